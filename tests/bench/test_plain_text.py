import pytest

from fsdpbench.bench.plain_text import clean_text


@pytest.mark.parametrize(
    ("foreign", "clean"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]8;;http://evil\x07link\x1b]8;;\x07", "link"),
        ("bell\x07 null\x00 delete\x7f c1\x9b", "bell null delete c1"),
        ("kept\n\ttoo", "kept\n\ttoo"),
        ("half \ud800 pair", "half ? pair"),
    ],
)
def test_foreign_texts_lose_what_terminals_obey(foreign, clean):
    assert clean_text(foreign) == clean
