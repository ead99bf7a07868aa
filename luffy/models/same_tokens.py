"""Checks that another model (the reference, a teacher, a second model) fits the policy's tokens and lengths."""

from __future__ import annotations

from typing import Any

from luffy.errors import UserError
from luffy.models.forward import max_positions, text_config
from luffy.models.load import token_count


def check_fits(named: str, model_config: Any, tokenizer: Any, longest: int, known: int | None = None) -> None:
    """Another model than the policy must know every token (``known``: the first ones that the policy knows) and take
    ``longest`` of them; ``named`` is its knob and path."""
    tokens = min(token_count(tokenizer), known or token_count(tokenizer))
    vocabulary = text_config(model_config).vocab_size
    if vocabulary < tokens:
        raise UserError(
            f"{named} has {vocabulary} tokens, fewer than the tokenizer's {tokens}; it "
            "must be a model of the policy's own tokenizer"
        )
    context = max_positions(model_config)
    if context < longest:
        raise UserError(
            f"{named} takes {context} tokens, but data.max_prompt_tokens + rollout.max_tokens = {longest}; lower one "
            "of them or take another model"
        )


def check_same_tokenizer(draft_tokenizer: Any, second_tokenizer: Any, called: str = "second model") -> None:
    """Both models must mean the same by every token id; the error names the first difference, and the second model as
    it is ``called``."""
    draft, second = draft_tokenizer.get_vocab(), second_tokenizer.get_vocab()
    names = [{token_id: token for token, token_id in vocab.items()} for vocab in (draft, second)]
    for token_id in sorted(names[0].keys() | names[1].keys()):
        _check_same(f"token id {token_id}", names[0].get(token_id), names[1].get(token_id), called)
    # Padding is left out: no model ever reads or writes it here.
    for kind in ("eos_token", "bos_token", "unk_token"):
        _check_same(kind, getattr(draft_tokenizer, kind, None), getattr(second_tokenizer, kind, None), called)
    special = [set(t.all_special_tokens) - {t.pad_token} for t in (draft_tokenizer, second_tokenizer)]
    for token in sorted(special[0] ^ special[1]):
        ours, theirs = ("there" if token in kept else None for kept in special)
        _check_same(f"{token!r} as a special token", ours, theirs, called)


def check_same_ids(draft_tokenizer: Any, second_tokenizer: Any, called: str) -> None:
    """Every token id that both have means the same. Less than `check_same_tokenizer` asks: for a model that only scores
    what the policy wrote, the end of a response may have another token, as in a base and its instruct model."""
    names = [{i: token for token, i in t.get_vocab().items()} for t in (draft_tokenizer, second_tokenizer)]
    for token_id in sorted(names[0].keys() & names[1].keys()):
        _check_same(f"token id {token_id}", names[0][token_id], names[1][token_id], called)


def _check_same(what: str, draft: object, second: object, called: str) -> None:
    if draft != second:
        raise UserError(
            f"the tokenizers differ: {what} is {_named(draft)} for the policy and {_named(second)} for the {called};"
            " both must have the same tokenizer"
        )


def _named(value: object) -> str:
    return "missing" if value is None else repr(value)
