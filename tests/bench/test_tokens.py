import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fsdpbench.bench.documents import Document, Message, Segment, spell_messages
from fsdpbench.bench.tokens import (
    BYTE_BEGIN,
    BYTE_END,
    NUM_BYTE_IDS,
    ByteEncoder,
    EncodedDocument,
    ModelEncoder,
    check_ids,
    choose_encoder,
)
from fsdpbench.errors import ConfigError

PLAIN_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# drops all answers but the last, as templates of thinking models drop their thoughts
REWRITING_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}"
    "<{{ m['role'] }}>{{ m['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_tokenizer(template=None, **special):
    """A tokenizer whose tokens are single characters."""
    characters = sorted(set("<>/ abcdefghijklmnopqrstuvwxyz0123456789+=?:\n"))
    vocabulary = {character: index for index, character in enumerate(["?!", *characters])}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="?!"))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="?!", **special)
    tokenizer.chat_template = template
    return tokenizer


def show(tokenizer, encoded):
    """Decode, with what is a target in capitals."""
    text = ""
    for token, target in zip(encoded.ids, encoded.is_target, strict=True):
        letter = tokenizer.convert_ids_to_tokens(token)
        text += letter.upper() if target else letter
    return text


def test_bytes_are_offset_and_framed():
    document = Document((Segment("a\u00e9", is_target=False), Segment("b")))
    encoded = ByteEncoder().encode(document)
    assert encoded.ids == (BYTE_BEGIN, 97 + 3, 0xC3 + 3, 0xA9 + 3, 98 + 3, BYTE_END)
    assert encoded.is_target == (False, False, False, False, True, True)
    assert max(ByteEncoder().encode(Document((Segment("\U0010ffff"),))).ids) < NUM_BYTE_IDS


def test_plain_text_ends_with_the_tokenizers_end():
    tokenizer = build_tokenizer(eos_token="z")
    encoded = ModelEncoder(tokenizer).encode(Document((Segment("ask ", False), Segment("it"))))
    assert show(tokenizer, encoded) == "ask ITZ"


def test_conversation_without_template_is_spelled_out():
    tokenizer = build_tokenizer()
    messages = (Message("user", "a?"), Message("assistant", "b"))
    document = Document(tuple(spell_messages(list(messages))), messages)
    assert show(tokenizer, ModelEncoder(tokenizer).encode(document)) == ("user: a?\nassistant: B\n")


def chat(*contents):
    messages = tuple(
        Message("user" if index % 2 == 0 else "assistant", content)
        for index, content in enumerate(contents)
    )
    return Document(tuple(spell_messages(list(messages))), messages)


def test_template_marks_the_answers_and_their_ends():
    tokenizer = build_tokenizer(PLAIN_TEMPLATE)
    encoded = ModelEncoder(tokenizer).encode(chat("ab", "cd", "ef", "gh", "ij"))
    assert show(tokenizer, encoded) == (
        "<user>ab</s><assistant>CD</S><user>ef</s><assistant>GH</S><user>ij</s>"
    )


def test_rewriting_template_trains_on_everything(caplog):
    tokenizer = build_tokenizer(REWRITING_TEMPLATE)
    encoded = ModelEncoder(tokenizer).encode(chat("ab", "cd", "ef", "gh"))
    assert show(tokenizer, encoded) == "<USER>AB</S><USER>EF</S><ASSISTANT>GH</S>"
    assert "rewrites earlier turns" in caplog.text


def test_encoder_follows_the_tokenizer():
    assert isinstance(choose_encoder(None), ByteEncoder)
    assert isinstance(choose_encoder(build_tokenizer()), ModelEncoder)


def test_tokens_beyond_the_vocabulary_are_refused():
    documents = [EncodedDocument((1, 7), (True, True)), EncodedDocument((), ())]
    check_ids(documents, 8)
    with pytest.raises(ConfigError, match="vocab_size=7: the data holds token 7"):
        check_ids(documents, 7)
