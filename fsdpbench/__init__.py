"""fsdpbench: an FSDP2 training engine with the tools that sweep, check and explain it.

Floor of the import order: this package holds only `errors`, `units`, `ranks`, `settings` and `log`;
`engine`, `bench`, `diagnose` and `reports` are the folders at the repository's top.
"""

__version__ = "0.1.0"
