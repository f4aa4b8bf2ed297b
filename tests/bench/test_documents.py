import json

import pytest

from fsdpbench.bench.documents import Document, Message, Segment, load_documents
from fsdpbench.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write_file(*entries, name="data.jsonl"):
        path = tmp_path / name
        lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(path)

    return write_file


def test_reads_the_three_kinds_of_lines(write):
    path = write(
        {"text": "caf\u00e9", "source": "ignored"},
        "",
        {"prompt": "2 + 2? ", "completion": "4"},
        {"prompt": "", "completion": "just an answer"},
        {
            "messages": [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Hi"},
            ]
        },
    )
    text, pair, bare, chat = load_documents(path)
    assert text == Document((Segment("caf\u00e9"),))
    assert pair == Document((Segment("2 + 2? ", False), Segment("4", True)))
    assert bare == Document((Segment("just an answer"),))
    assert chat.messages == (Message("user", "Hello"), Message("assistant", "Hi"))
    assert chat.segments == (
        Segment("user: ", False),
        Segment("Hello\n", False),
        Segment("assistant: ", False),
        Segment("Hi\n", True),
    )


def test_text_file_has_a_document_per_paragraph(write):
    path = write("one", "still one", "", "  ", "two", name="data.txt")
    assert [document.segments[0].text for document in load_documents(path)] == [
        "one\nstill one\n",
        "two\n",
    ]


def test_bundled_text_needs_no_file():
    documents = load_documents(None)
    assert len(documents) > 300
    assert all(segment.is_target for document in documents for segment in document.segments)


def test_stops_when_it_has_enough(write):
    path = write({"text": "x" * 10}, {"text": "y" * 10}, {"text": "z" * 10}, "{broken")
    assert len(load_documents(path, max_characters=15)) == 2
    with pytest.raises(ConfigError, match=":4"):
        load_documents(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{'text': 1}", "is not JSON: .* at column 2"),
        ("[1]", "must be an object"),
        ({"txt": "a", "id": 3}, "=txt, id: has no 'text'"),
        ({"prompt": "a"}, "=prompt: has no 'completion'"),
        ({"completion": "a"}, "has no 'prompt'"),
        ({"text": 5}, "text=int: must be a string"),
        ({"text": ""}, "must not be empty"),
        ({"prompt": "a", "completion": ""}, "completion='': must not be empty"),
        ({"messages": []}, "must be a list of messages"),
        ({"messages": ["a"]}, r"messages\[0\]=str"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content=missing"),
        ({"messages": [{"role": "user", "content": None}]}, r"content=NoneType"),
        ({"messages": [{"role": "user", "content": "a"}]}, "role 'assistant'"),
    ],
)
def test_a_bad_line_is_named(write, line, words):
    path = write({"text": "good"}, line)
    with pytest.raises(ConfigError, match=words) as caught:
        load_documents(path)
    assert f"{path}:2" in str(caught.value)


def test_all_mistakes_at_once_but_not_thousands(write):
    path = write(*["{"] * 2, {"text": "good"}, *["["] * 2)
    with pytest.raises(ConfigError) as caught:
        load_documents(path)
    assert [violation.where[-2:] for violation in caught.value.violations] == [
        ":1",
        ":2",
        ":4",
        ":5",
    ]
    with pytest.raises(ConfigError) as caught:
        load_documents(write(*["{"] * 1000))
    assert len(caught.value.violations) == 5


def test_files_that_cannot_be_read(tmp_path, write):
    with pytest.raises(ConfigError, match="No such file"):
        load_documents(str(tmp_path / "absent.jsonl"))
    with pytest.raises(ConfigError, match=r"must end in \.jsonl or \.txt"):
        load_documents(write("a,b", name="data.csv"))
    with pytest.raises(ConfigError, match="holds no text"):
        load_documents(write("", name="data.txt"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="must be UTF-8"):
        load_documents(str(tmp_path / "latin.txt"))
