import json

from fsdpbench.bench.corpus import DEFAULT_DATA, WRITERS, build_corpus


def test_the_bundled_file_is_what_the_generator_writes():
    assert DEFAULT_DATA.read_text() == build_corpus()


def test_size_and_fields():
    text = DEFAULT_DATA.read_text()
    assert 50_000 < len(text) < 200_000
    assert text.isascii()
    entries = [json.loads(line) for line in text.splitlines()]
    assert {tuple(entry) for entry in entries} == {("text",)}
    assert all(entry["text"].strip() for entry in entries)
    assert len({entry["text"] for entry in entries}) > len(entries) * 0.75


def test_the_seed_decides():
    assert build_corpus(seed=1, num_rounds=2) == build_corpus(seed=1, num_rounds=2)
    assert build_corpus(seed=1, num_rounds=2) != build_corpus(seed=2, num_rounds=2)


def test_worked_answers_are_right():
    entries = [json.loads(line) for line in build_corpus().splitlines()]
    checked = 0
    for entry in entries:
        words = entry["text"].replace(",", "").replace(".", "").split()
        for index, word in enumerate(words):
            if word in ("times", "minus") and words[index + 2 : index + 4] == ["which", "is"]:
                left, right, result = (int(words[index + offset]) for offset in (-1, 1, 4))
                assert result == (left * right if word == "times" else left - right)
                checked += 1
    assert checked >= 3 * len(entries) // len(WRITERS)
