"""Text to token ids and back, over the Hugging Face ``tokenizers`` library."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from minillm.core.model_config import CheckpointError, read_json


class Tokenizer:
    """The tokenizer of a checkpoint folder: ``tokenizer.json``, special tokens and chat template."""

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.exists():
            raise CheckpointError(f"{path}: no such file; tokenizer.model and vocab.txt are not read")
        try:
            self._fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: is not a tokenizer ({error})") from None
        config_path = folder / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        self.special_tokens = {
            name: token["content"] if isinstance(token, dict) else token
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (token := config.get(name))
        }
        self.chat_template = _chat_template(folder, config, config_path)

    def __len__(self) -> int:
        return self._fast.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        """All of it, in the ``tokenizers`` library's format."""
        return self._fast.to_str()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._fast.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: list[int]) -> str:
        """Text of these tokens, special tokens left out; bytes that make no character become U+FFFD."""
        return self._fast.decode(token_ids, skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """One token's own text, special tokens included."""
        return self._fast.decode([token_id], skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        return self._fast.token_to_id(token)

    def encode_chat(self, messages: list[dict]) -> list[int]:
        """Messages [{"role": …, "content": …}, …] through the checkpoint's chat template, ready for the answer."""
        if self.chat_template is None:
            raise ValueError("this model has no chat template: it completes text but was not trained to chat")
        for message in messages:
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                raise ValueError(f"{message!r} is no chat message; it must be a dict with role and content")
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, _ = render_jinja_template(
            [messages], chat_template=self.chat_template, add_generation_prompt=True, **self.special_tokens
        )
        # The template writes the special tokens itself.
        return self.encode(rendered[0], add_special_tokens=False)


def _chat_template(folder: Path, config: dict, config_path: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{config_path}: chat_template is a {type(template).__name__}; it must be a string")
    return template


class IncrementalDetokenizer:
    """Text of a growing token sequence, piece by piece, never half a character.

    New tokens are decoded together with a few settled ones before them, their context, since some tokenizers write a
    token differently at the start of a text. U+FFFD at the end may be a character whose other bytes are still to come,
    and is held back until a later token settles it or ``finish`` is called.
    """

    CONTEXT = 6  # prompt tokens to start with

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int]):
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []  # tokens whose text is not all given out
        # Half a character at the prompt's end is no context: its text could not be told from the output's.
        for length in range(min(self.CONTEXT, len(prompt_token_ids)), 0, -1):
            context = prompt_token_ids[-length:]
            if not tokenizer.decode(context).endswith("\ufffd"):
                self._context = context
                break
        self._context_text = self._given = tokenizer.decode(self._context)  # _given: of context and pending tokens

    def add(self, token_id: int) -> str:
        """The text that this token settles; "" if it must wait for more."""
        self._pending.append(token_id)
        window = self._tokenizer.decode(self._context + self._pending)
        if not window.startswith(self._context_text):
            # A decoder with byte tokens takes neighbouring ones as one string, and if the last character of that is
            # not whole, as no characters at all. So these tokens are bytes, and need no context.
            self._given = self._given[len(self._context_text) :]
            self._context, self._context_text = [], ""
            window = self._tokenizer.decode(self._pending)
        settled = window.rstrip("\ufffd")
        new = settled[len(self._given) :]
        self._given += new
        if settled == window:
            if new or not self._context:
                self._context, self._pending = self._pending, []
                self._context_text = self._given = self._tokenizer.decode(self._context)
            else:
                self._pending.pop()  # a special token: it has no text, so it would be no context
        return new

    def finish(self) -> str:
        """What was held back, as it is."""
        return self._tokenizer.decode(self._context + self._pending)[len(self._given) :]
