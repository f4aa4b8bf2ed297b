"""Engines for one objective each, thin over FSDPEngine."""
