"""Tokenizer and incremental detokenizer. Checks of the latter also run on wrong versions, which they must refuse."""

import json
import random

import pytest

from minillm.models.tokenizer import CheckpointError, IncrementalDetokenizer, Tokenizer
from tests import toy_tokenizers as toy

HALF = "\ufffd"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def byte_level(folder):
    return toy.byte_level(folder / "byte_level")


@pytest.fixture(scope="module")
def fallback(folder):
    return toy.sentencepiece_like(folder / "sentencepiece_like")


# -- the toy tokenizers are what they should be ---------------------------------------------------------------------


def test_byte_level_covers_every_byte_and_round_trips(byte_level):
    assert len(byte_level) == 256 + len(toy.MERGED) + 2 + 1
    for byte in range(128):
        assert byte_level.token_text(byte) == chr(byte)
    rng = random.Random(0)
    for _ in range(50):
        text = toy.random_text(rng)
        assert byte_level.decode(byte_level.encode(text)) == text
        assert byte_level.decode(toy.byte_ids(text)) == text
    assert byte_level.token_text(byte_level.encode(" the")[0]) == " the"


def test_fallback_round_trips(fallback):
    rng = random.Random(0)
    for _ in range(50):
        text = "a" + toy.random_text(rng)  # a space at the start would be lost, as in Llama 2
        assert fallback.decode(fallback.encode(text)) == text
    assert fallback.decode(toy.fallback_ids("😀😁")) == "😀😁"
    assert fallback.decode([*toy.fallback_ids("😀"), *toy.fallback_ids(b"\xf0")]) == HALF * 5, "a run of bytes is one"


# -- Tokenizer ------------------------------------------------------------------------------------------------------


def test_special_tokens_are_not_text(byte_level):
    end = byte_level.token_id(toy.END)
    assert byte_level.decode([*toy.byte_ids("a"), end, *toy.byte_ids("b")]) == "ab"
    assert byte_level.token_text(end) == toy.END
    assert byte_level.encode(f"a{toy.END}") == [ord("a"), end]
    assert byte_level.token_id("no such token") is None


def test_special_tokens_come_as_strings_or_objects(byte_level, fallback):
    assert byte_level.special_tokens == {"eos_token": toy.END}
    assert fallback.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_ids_beyond_the_tokenizer_have_no_text(byte_level):
    """A model's vocabulary may be padded."""
    assert byte_level.decode([97, 100_000, 98]) == "ab"
    assert byte_level.token_text(100_000) == ""


def test_a_folder_without_tokenizer_json(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "none such"}}'])
def test_a_broken_tokenizer_json(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not a tokenizer"):
        Tokenizer(tmp_path)


def test_no_tokenizer_config_is_needed(tmp_path):
    toy.byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer(str(tmp_path))
    assert tokenizer.special_tokens == {}
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


# -- chat -----------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT = [{"role": "user", "content": "a 中"}]


@pytest.mark.parametrize(
    "stored",
    [TEMPLATE, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]],
    ids=["one", "named"],
)
def test_chat_template_of_the_config(tmp_path, stored):
    toy.byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": toy.END, "chat_template": stored}))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode_chat(CHAT)
    assert ids == tokenizer.encode(f"[user]a 中{toy.END}[assistant]", add_special_tokens=False)
    assert tokenizer.token_id(toy.END) in ids, "the template's special tokens are tokens, not text"


def test_a_template_file_wins(tmp_path):
    toy.byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "no"}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    assert Tokenizer(tmp_path).chat_template == TEMPLATE


@pytest.mark.parametrize("stored", [7, {"default": TEMPLATE}, [{"name": "default", "template": 7}]])
def test_a_template_of_a_wrong_type(tmp_path, stored):
    toy.byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": stored}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template is a (int|dict)"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("message", ["hi", {"role": "user"}, {"content": "hi"}, None])
def test_what_is_no_message(tmp_path, message):
    toy.byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    with pytest.raises(ValueError, match="is no chat message; it must be a dict with role and content"):
        Tokenizer(tmp_path).encode_chat([message])


# -- incremental detokenization: checks of f(tokenizer, prompt ids), byte-level ------------------------------------


def run(make, tokenizer, prompt, ids) -> list[str]:
    """What each token gave, and what finish gave."""
    detokenizer = make(tokenizer, list(prompt))
    return [*[detokenizer.add(token) for token in ids], detokenizer.finish()]


def texts(seed, count=60):
    rng = random.Random(seed)
    return [toy.random_text(rng) for _ in range(count)]


def garbage(seed, count=150):
    rng = random.Random(seed)
    return [toy.random_garbage(rng) for _ in range(count)]


def check_text_is_the_decoded_whole(make, byte_level, fallback):
    """Whatever the tokens: single bytes, or merged ones; characters, or bytes that are none."""
    for text in texts(0):
        for ids in (toy.byte_ids(text), byte_level.encode(text)):
            assert "".join(run(make, byte_level, toy.byte_ids("Say: "), ids)) == text
    rng = random.Random(1)
    for data in garbage(2):
        assert "".join(run(make, byte_level, [], toy.byte_ids(data))) == byte_level.decode(toy.byte_ids(data))
        ids = [rng.randrange(len(byte_level)) for _ in range(20)]
        assert "".join(run(make, byte_level, [65], ids)) == byte_level.decode(ids)


def check_no_half_characters(make, byte_level, fallback):
    for text in texts(3):
        for tokenizer, ids in ((byte_level, toy.byte_ids(text)), (fallback, fallback.encode("a" + text)[1:])):
            assert HALF not in "".join(run(make, tokenizer, tokenizer.encode("a"), ids)), text


def check_nothing_is_held_back_without_need(make, byte_level, fallback):
    """After each token all is out but a last character that may still change."""
    rng = random.Random(4)
    cases = [toy.byte_ids(data) for data in [*texts(4), *garbage(5)]]
    cases += [[rng.randrange(128, len(byte_level)) for _ in range(20)] for _ in range(100)]
    for ids in cases:
        shown = ""
        for i, piece in enumerate(run(make, byte_level, [65], ids)[:-1]):
            shown += piece
            assert shown == byte_level.decode(ids[: i + 1]).rstrip(HALF)


def check_a_prompt_that_ends_in_half_a_character(make, byte_level, fallback):
    """Its other half has no text of its own; what follows must not suffer."""
    half = toy.byte_ids("ab中".encode()[:-1])
    for output in (b"\xad", b"\xad and", b"b", "中😀".encode(), b"\xad\xad" + "中".encode()):
        ids = toy.byte_ids(output)
        assert "".join(run(make, byte_level, half, ids)) == byte_level.decode(ids)
    # All of a short prompt's bytes, and more of them than a context holds.
    for prompt in (b"\xe4", b"\xad" * 10, "中".encode() * 5 + b"\xf0\x9f"):
        assert "".join(run(make, byte_level, toy.byte_ids(prompt), toy.byte_ids(" the"))) == " the"


def check_a_prompt_that_begins_in_half_a_character(make, byte_level, fallback):
    """As the context cut from a longer one may."""
    for prompt in ("中中中a", "😀😀", "é" * 7):
        for cut in range(1, 6):
            ids = toy.byte_ids(prompt)[-cut:]
            for text in ("b", " the", "中"):
                assert "".join(run(make, byte_level, toy.byte_ids("x" * 20) + ids, toy.byte_ids(text))).endswith(text)


def check_replacement_characters_of_the_text_itself(make, byte_level, fallback):
    for text in ("\ufffd", "a\ufffd", "\ufffd\ufffd\ufffd\ufffd\ufffdb", "\ufffd😀\ufffd"):
        assert "".join(run(make, byte_level, [65], toy.byte_ids(text))) == text


# -- and with ▁ and byte tokens ---------------------------------------------------------------------------------------


def check_spaces_between_tokens(make, byte_level, fallback):
    """A decoder drops the space at the start of a text, which the output's is not, if there was a prompt."""
    ids = fallback.encode("and the and")
    assert "".join(run(make, fallback, [1], ids)) == "and the and"
    assert "".join(run(make, fallback, [1, *fallback.encode("a")], ids)) == " and the and"
    assert "".join(run(make, fallback, fallback.encode("a b c d e b c d e"), fallback.encode("the"))) == " the"
    assert "".join(run(make, fallback, fallback.encode("a 😀😀"), fallback.encode("the"))) == " the"
    space, the = fallback.encode("a  the")[-2:]
    assert "".join(run(make, fallback, fallback.encode("a"), [space, space, the])) == "   the"


def check_neighbouring_byte_characters(make, byte_level, fallback):
    """Byte tokens of one character garble those of the one before until they are complete."""
    for text in ("😀😁", "ßß", "한Ω한", "a😀b😁😀", "👩\u200d👩\u200d👧🇸🇪"):
        for prompt in ("a", "a😀", "the and 😀😀"):
            pieces = run(make, fallback, fallback.encode(prompt), toy.fallback_ids(text))
            assert "".join(pieces) == text
            assert HALF not in "".join(pieces)
    for text in texts(6):
        ids = fallback.encode("a" + text)
        assert "".join(run(make, fallback, ids[:1], ids[1:])) == fallback.decode(ids)[1:]
        assert "".join(run(make, fallback, [1], ids)) == "a" + text


def check_byte_characters_come_at_once(make, byte_level, fallback):
    ids = toy.fallback_ids("😀😁")
    assert run(make, fallback, fallback.encode("a"), ids) == ["", "", "", "😀", "", "", "", "😁", ""]


def check_special_tokens_in_between(make, byte_level, fallback):
    """They have no text (ignore_eos goes on past them), and must not make the next token the start of a text."""
    a, the = fallback.encode("a"), fallback.encode("the")
    for specials in ([2], [2] * 10):
        assert "".join(run(make, fallback, a, [*specials, *the, *specials, *the])) == " the the"
        assert "".join(run(make, fallback, [*a, *specials[:3]], the)) == " the"
    end = byte_level.token_id(toy.END)
    ids = [*toy.byte_ids("中a"), end, *toy.byte_ids("中"), end, end]
    assert "".join(run(make, byte_level, [end], ids)) == "中a中"


def check_bytes_that_make_no_character(make, byte_level, fallback):
    """Garbage is shown as such, and does no harm to what came before and comes after."""
    a, the = fallback.encode("a"), fallback.encode(" the")
    for data in (b"\x80", b"\xf0\x9f", b"\xff" * 9, "中".encode()[:2] + b"\xff"):
        for before in ("and", "b😀", "b😀😀"):
            ids = fallback.encode(before)[1:] + toy.fallback_ids(data)
            given = "".join(run(make, fallback, a, [*ids, *the, *the]))
            start, end = fallback.decode([*a, *fallback.encode(before)[1:]])[1:], " the the"
            assert given.startswith(start) and given.endswith(end)
            assert set(given[len(start) : -len(end)]) == {HALF}
            held = "".join(run(make, fallback, a, ids))
            assert held.startswith(start) and set(held[len(start) :]) == {HALF}


CHECKS = [
    check_text_is_the_decoded_whole,
    check_no_half_characters,
    check_nothing_is_held_back_without_need,
    check_a_prompt_that_ends_in_half_a_character,
    check_a_prompt_that_begins_in_half_a_character,
    check_replacement_characters_of_the_text_itself,
    check_spaces_between_tokens,
    check_neighbouring_byte_characters,
    check_byte_characters_come_at_once,
    check_special_tokens_in_between,
    check_bytes_that_make_no_character,
]


@pytest.mark.parametrize("check", CHECKS)
def test_detokenizer(check, byte_level, fallback):
    check(IncrementalDetokenizer, byte_level, fallback)


class TokenByToken:
    def __init__(self, tokenizer, prompt):
        self.tokenizer = tokenizer

    def add(self, token):
        return self.tokenizer.decode([token])

    def finish(self):
        return ""


class Whole:
    """Decodes everything again for every token; right but for what it holds back."""

    hold = staticmethod(lambda text: len(text.rstrip(HALF)))

    def __init__(self, tokenizer, prompt):
        self.tokenizer, self.ids, self.prompt = tokenizer, [], prompt
        self.shown = len(self.text())

    def text(self):
        return self.tokenizer.decode(self.prompt + self.ids)

    def add(self, token):
        self.ids.append(token)
        text = self.text()
        old, self.shown = self.shown, max(self.shown, self.hold(text))
        return text[old : self.shown]

    def finish(self):
        return self.text()[self.shown :]


class HoldsNothing(Whole):
    hold = staticmethod(len)


class HoldsEverything(Whole):
    hold = staticmethod(lambda text: 0)


class HoldsUntilWhole(Whole):
    """Nothing comes out while the text ends in half a character."""

    hold = staticmethod(lambda text: 0 if text.endswith(HALF) else len(text))


class DropsTheRest(Whole):
    def finish(self):
        return ""


class HoldsThreeAtMost(Whole):
    """A character has at most three bytes to wait with; but a run of byte tokens has more."""

    hold = staticmethod(lambda text: max(len(text.rstrip(HALF)), len(text) - 3))


class NoContext(Whole):
    def __init__(self, tokenizer, prompt):
        super().__init__(tokenizer, [])


class DropsReplacementCharacters(Whole):
    def add(self, token):
        return super().add(token).replace(HALF, "")


class SmallWindow(IncrementalDetokenizer):
    """Takes the last token alone for context, special or not."""

    def add(self, token):
        new = super().add(token)
        if not self._pending:
            self._context = [token]
            self._context_text = self._given = self._tokenizer.decode(self._context)
        return new


WRONG = {
    TokenByToken: [check_text_is_the_decoded_whole, check_no_half_characters, check_byte_characters_come_at_once],
    Whole: [check_a_prompt_that_ends_in_half_a_character],
    HoldsNothing: [
        check_text_is_the_decoded_whole,
        check_no_half_characters,
        check_neighbouring_byte_characters,
        check_a_prompt_that_begins_in_half_a_character,
    ],
    HoldsEverything: [check_nothing_is_held_back_without_need, check_byte_characters_come_at_once],
    HoldsUntilWhole: [check_nothing_is_held_back_without_need],
    HoldsThreeAtMost: [check_neighbouring_byte_characters],
    DropsTheRest: [check_text_is_the_decoded_whole, check_bytes_that_make_no_character],
    NoContext: [check_spaces_between_tokens, check_special_tokens_in_between],
    DropsReplacementCharacters: [check_replacement_characters_of_the_text_itself, check_bytes_that_make_no_character],
    SmallWindow: [check_special_tokens_in_between],
}


@pytest.mark.parametrize("make", WRONG)
def test_a_wrong_detokenizer_is_noticed(make, byte_level, fallback):
    for check in WRONG[make]:
        with pytest.raises(AssertionError):
            check(make, byte_level, fallback)


def test_every_check_refuses_something():
    assert {check for checks in WRONG.values() for check in checks} == set(CHECKS)


@pytest.mark.parametrize("token", [2, 259], ids=["special", "text"])
def test_windows_stay_small(fallback, token):
    """Decoding costs as much as a window is long: it must not grow with the output."""
    detokenizer = IncrementalDetokenizer(fallback, fallback.encode("a b c d e"))
    for _ in range(1000):
        detokenizer.add(token)
    assert len(detokenizer._context) + len(detokenizer._pending) < 10


def test_finish_changes_nothing(byte_level):
    detokenizer = IncrementalDetokenizer(byte_level, [65])
    detokenizer.add(0xE4)
    assert detokenizer.finish() == detokenizer.finish() == HALF
    assert "".join(map(detokenizer.add, (0xB8, 0xAD))) == "中"
