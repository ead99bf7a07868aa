"""What two models need so that one may override the other's tokens; every check names what to change."""

from __future__ import annotations

from typing import Any

from torch import nn

from luffy.errors import UserError
from luffy.models.forward import causal_lm, head_weight_bias
from luffy.models.load import token_count
from luffy.types import Request


def check_settings(k: int, max_overrides: int | None, second_temperature: float | None) -> None:
    if k < 1:
        raise UserError(f"k is {k}: the draft proposes at least 1 token in a round")
    if max_overrides is not None and max_overrides < 0:
        raise UserError(f"max_overrides is {max_overrides}: use 0 or more, or None for no limit")
    if second_temperature is not None and not 0.0 < second_temperature < float("inf"):
        raise UserError(f"second_temperature is {second_temperature}: use a positive number")


def check_pair(model: nn.Module, second_model: nn.Module, max_context: int) -> None:
    """Refuse models whose tokens or contexts do not fit each other."""
    draft, second = causal_lm(model).config, causal_lm(second_model).config
    if draft.vocab_size < second.vocab_size:
        raise UserError(
            f"the policy has a vocabulary of {draft.vocab_size} tokens, the second model of {second.vocab_size}:"
            " if both have the same tokenizer, cut the second model's with luffy.models.drop_padding_tokens"
        )
    if second.max_position_embeddings < max_context:
        raise UserError(
            f"the second model takes {second.max_position_embeddings} tokens, less than the context of"
            f" {max_context}: set max_context to at most {second.max_position_embeddings}"
        )


def check_fits(named: str, model_config: Any, tokenizer: Any, longest: int, known: int | None = None) -> None:
    """A model beside the policy must know every token (``known``: the first ones that the policy knows) and take
    ``longest`` of them; ``named`` is its knob and path."""
    tokens = min(token_count(tokenizer), known or token_count(tokenizer))
    if model_config.vocab_size < tokens:
        raise UserError(
            f"{named} has {model_config.vocab_size} tokens, fewer than the tokenizer's {tokens}; it "
            "must be a model of the policy's own tokenizer"
        )
    context = getattr(model_config, "max_position_embeddings", None)
    if context is not None and context < longest:
        raise UserError(
            f"{named} takes {context} tokens, but data.max_prompt_tokens + rollout.max_tokens = {longest}; lower one "
            "of them or take another model"
        )


def check_same_device(model: nn.Module, second_model: nn.Module) -> None:
    devices = [head_weight_bias(m)[0].device for m in (model, second_model)]
    if devices[0] != devices[1]:
        raise UserError(f"the policy lies on {devices[0]}, the second model on {devices[1]}: move one of them")


def check_exact(request: Request) -> None:
    """Refuse sampling under which the behaviour would not be the distribution that is reported."""
    sampling = request.sampling
    if sampling.temperature == 0:
        raise UserError(
            "temperature is 0: under overrides tokens must be drawn from a distribution; sample with a positive"
            " temperature, or decode greedily without overrides"
        )
    if sampling.is_filtered:
        raise UserError(
            f"top_p is {sampling.top_p} and top_k is {sampling.top_k}: under overrides the probability of every token"
            " must be exact, so leave both off (top_p 1, top_k 0)"
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
