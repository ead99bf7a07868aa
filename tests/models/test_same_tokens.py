"""What a model beside the policy must share with it."""

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from luffy.errors import UserError
from luffy.models.load import check_same_tokenizer


def tokenizer(words: str, **special) -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(words.split())}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="?")), **special)


def test_tokenizers_must_agree_and_the_first_difference_is_named():
    mine = tokenizer("? a b c", eos_token="c", pad_token="?")
    check_same_tokenizer(mine, tokenizer("? a b c", eos_token="c", pad_token="a"))
    for other, message in (
        (tokenizer("? a x c", eos_token="c"), "token id 2 is 'b' for the policy and 'x' for the second model"),
        (tokenizer("? a b c d", eos_token="c"), "token id 4 is missing for the policy and 'd'"),
        (tokenizer("? a b c", eos_token="b"), "eos_token is 'c' for the policy and 'b'"),
        (tokenizer("? a b c", eos_token="c", bos_token="a"), "bos_token is missing for the policy and 'a'"),
        (tokenizer("? a b c", eos_token="c", additional_special_tokens=["b"]), "'b' as a special token is missing"),
    ):
        with pytest.raises(UserError, match=message):
            check_same_tokenizer(mine, other)
