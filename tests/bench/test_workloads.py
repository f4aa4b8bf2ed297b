import json
from itertools import chain

import pytest

from fsdpbench.bench.documents import Document, Segment, load_workload
from fsdpbench.bench.records import WorkloadSpec
from fsdpbench.bench.tokens import ByteEncoder, EncodedDocument
from fsdpbench.bench.workloads import (
    TokenStream,
    build_batch,
    iterate_batches,
    shorten_bundled,
)
from fsdpbench.errors import ConfigError


def make(spec, dp_rank=0, dp_size=1, documents=None, vocab_size=512, longest=4096):
    if documents is None:
        documents = load_workload(spec, dp_size)
    else:
        spec = spec.model_copy(update={"data": "given.jsonl"})
    return list(
        iterate_batches(
            spec,
            documents,
            ByteEncoder(),
            dp_rank=dp_rank,
            dp_size=dp_size,
            vocab_size=vocab_size,
            longest=longest,
        )
    )


def rows(batch):
    """The sequences of a batch as lists, read through the attention mask."""
    ids, mask = batch.tensors["input_ids"], batch.tensors["attention_mask"]
    return [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]


def letters(count, length):
    """Documents of one letter each."""
    return [Document((Segment(chr(97 + index) * length),)) for index in range(count)]


def test_fills_every_step_with_real_tokens():
    spec = WorkloadSpec(tokens_per_step=1000, steps=3, warmup_steps=1)
    batches = make(spec)
    assert len(batches) == 4
    for batch in batches:
        lengths = [len(row) for row in rows(batch)]
        assert batch.sequence_lengths == (tuple(lengths),)
        assert 999 <= sum(lengths) == batch.num_tokens <= 1000
        assert len(set(lengths)) > 1
        assert min(lengths) >= 2
        assert batch.tensors["input_ids"].shape == (len(lengths), max(lengths))


def test_tokens_are_the_text():
    spec = WorkloadSpec(tokens_per_step=100_000, steps=1, warmup_steps=0)
    (batch,) = make(spec)
    assert len(rows(batch)) > 100
    texts = {
        "".join(segment.text for segment in document.segments)
        for document in load_workload(spec, 1)
    }
    first = bytes(byte - 3 for byte in rows(batch)[0][1:-1]).decode()
    assert first in texts


def test_data_parallel_indices_share_one_order():
    documents = [Document((Segment(f"{number:04} " * 8),)) for number in range(100)]  # 42 tokens
    spec = WorkloadSpec(tokens_per_step=500, steps=2, warmup_steps=0)
    per_rank = [make(spec, dp_rank, 3, documents) for dp_rank in range(3)]
    for step in range(2):
        assert len({batches[step].sequence_lengths for batches in per_rank}) == 1
        for dp_rank, batches in enumerate(per_rank):
            lengths = tuple(len(row) for row in rows(batches[step]))
            assert lengths == batches[step].sequence_lengths[dp_rank]
    seen = [tuple(row) for batches in per_rank for batch in batches for row in rows(batch)]
    assert len(seen) > 60
    assert len(set(seen)) == len(seen)  # no document is given to two


def test_the_seed_decides():
    spec = WorkloadSpec(tokens_per_step=300, steps=2, warmup_steps=0, seed=1)
    other = spec.model_copy(update={"seed": 2})
    assert [rows(batch) for batch in make(spec)] == [rows(batch) for batch in make(spec)]
    assert [rows(batch) for batch in make(spec)] != [rows(batch) for batch in make(other)]


def test_each_pass_sees_each_document_once_in_a_new_order():
    documents = letters(8, 10)
    spec = WorkloadSpec(tokens_per_step=12 * 8, steps=3, warmup_steps=0)
    passes = [[row[1] for row in rows(batch)] for batch in make(spec, documents=documents)]
    assert all(sorted(seen) == [97 + 3 + index for index in range(8)] for seen in passes)
    assert len({tuple(seen) for seen in passes}) > 1


@pytest.mark.parametrize("lengths", [[64, 64], [100, 7, 2]], ids=str)
def test_fixed_lengths_are_exact(lengths):
    spec = WorkloadSpec(sequence_lengths=lengths, steps=3, warmup_steps=0)
    for batch in make(spec, dp_rank=1, dp_size=2):
        assert [len(row) for row in rows(batch)] == lengths
        assert batch.sequence_lengths == (tuple(lengths),) * 2


def test_fixed_lengths_lose_no_token():
    documents = letters(3, 5)  # 7 tokens each
    spec = WorkloadSpec(sequence_lengths=[4, 3, 5, 9], steps=2, warmup_steps=0)
    tokens = list(chain(*chain(*[rows(batch) for batch in make(spec, documents=documents)])))
    assert len(tokens) == 42
    for start in range(0, 42, 7):
        begin, *text, end = tokens[start : start + 7]
        assert (begin, end) == (1, 2)
        assert len(set(text)) == 1


def test_a_long_document_goes_on_in_the_next_sequence():
    documents = letters(1, 28)  # 30 tokens
    spec = WorkloadSpec(tokens_per_step=12, steps=5, warmup_steps=0)
    lengths = [[len(row) for row in rows(batch)] for batch in make(spec, documents=documents)]
    assert lengths == [[12], [12], [6, 6], [12], [12]]
    lengths = [len(row) for row in rows(make(spec, documents=documents, longest=5)[0])]
    assert lengths == [5, 5, 2]


def test_no_sequence_of_one_token():
    stream = TokenStream([EncodedDocument((1, 2, 3, 4, 5), (True,) * 5)], seed=0)
    taken = [[len(piece.ids) for piece in stream.fill(8, longest=4)] for _ in range(3)]
    assert all(min(lengths) >= 2 and 5 <= sum(lengths) <= 8 for lengths in taken)


def test_masks_say_what_is_learned():
    batch = build_batch(
        [EncodedDocument((5, 6, 7), (False, True, True)), EncodedDocument((8, 9), (False, True))]
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch["attention_mask"].tolist() == [[True] * 3, [True, True, False]]
    assert batch["loss_mask"].tolist() == [[False, True, True], [False, True, False]]


def test_a_user_file_is_read_as_far_as_needed(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"text": "x" * 100}) for _ in range(1000)))
    spec = WorkloadSpec(data=str(path), tokens_per_step=50, steps=1, warmup_steps=1)
    assert len(load_workload(spec, dp_size=2)) == 2 * 2 * 50 * 8 // 100


@pytest.mark.parametrize("lengths", [[], [5, 1], [0]], ids=str)
def test_impossible_lengths_are_refused(lengths):
    with pytest.raises(ConfigError, match=r"workload\.sequence_lengths"):
        load_workload(WorkloadSpec(sequence_lengths=lengths), 1)


def test_tokens_that_are_not_the_sum_of_the_lengths_are_refused():
    spec = WorkloadSpec(sequence_lengths=[64, 64], tokens_per_step=100)
    with pytest.raises(ConfigError) as caught:
        load_workload(spec, 1)
    text = str(caught.value)
    assert "workload.tokens_per_step=100: must be 128, the sum of workload.sequence_lengths" in text
    assert "leave it out" in text
    assert load_workload(spec.model_copy(update={"tokens_per_step": 128}), 1)


def test_lengths_beyond_the_model_are_refused():
    with pytest.raises(ConfigError, match="must not exceed the model's 64 positions"):
        make(WorkloadSpec(sequence_lengths=[65]), longest=64)


def test_vocabulary_without_room_for_bytes_is_refused():
    with pytest.raises(ConfigError, match="vocab_size=100"):
        make(WorkloadSpec(), vocab_size=100)


def test_a_step_of_prompts_only_is_refused():
    documents = [Document((Segment("q" * 50, is_target=False), Segment("a")))]
    with pytest.raises(ConfigError, match="step 0: holds prompts only"):
        make(WorkloadSpec(tokens_per_step=20), documents=documents)


def test_shortened_text_is_its_front():
    encoded = [ByteEncoder().encode(document) for document in load_workload(WorkloadSpec(), 99)]
    kept = shorten_bundled(encoded, 5000)
    assert 5000 <= sum(len(document.ids) for document in kept) < 5600
    assert kept == encoded[: len(kept)]
    assert shorten_bundled(encoded, 10**9) == encoded


@pytest.mark.parametrize("data", [None, "given.jsonl"])
def test_only_the_bundled_text_comes_back_every_second_step(data):
    documents = letters(26, 50)  # 52 tokens each
    spec = WorkloadSpec(data=data, tokens_per_step=52 * 3, steps=4, warmup_steps=0)
    seen = [
        {row[1] for row in rows(batch)}
        for batch in iterate_batches(
            spec, documents, ByteEncoder(), dp_rank=0, dp_size=1, vocab_size=512, longest=99
        )
    ]
    again = (seen[0] | seen[1]) == (seen[2] | seen[3])
    assert again == (data is None)


def test_documents_without_tokens_are_refused():
    with pytest.raises(ConfigError, match="no document of 2 tokens"):
        TokenStream([EncodedDocument((1,), (True,))], seed=0)
