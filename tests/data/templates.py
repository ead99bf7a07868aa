"""Chat templates with the structure of well-known models' own, shortened, and byte-level tokenizers for them."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TOOLS_TEXT = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
)
QWEN_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
QWEN_RESULTS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
QWEN_OPENS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
QWEN25 = (
    TOOLS_TEXT + "{% for m in messages %}{% if m.role == 'tool' %}" + QWEN_RESULTS + "{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}" + QWEN_CALLS + "<|im_end|>\n{% endif %}{% endfor %}" + QWEN_OPENS
)
QWEN3 = (  # thoughts before the last question go; the last turn gets an empty one
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}" + TOOLS_TEXT + "{% for m in messages %}{% if m.role == 'tool' %}" + QWEN_RESULTS
    + "{% elif m.role == 'assistant' %}{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content %}"
    "<|im_start|>assistant\n{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ text }}" + QWEN_CALLS + "<|im_end|>\n{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + QWEN_OPENS
)  # fmt: skip
QWQ = QWEN3.replace(QWEN_OPENS, "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}")
LLAMA31 = (  # one call in a turn, without a text next to it
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ strftime_now('%d %b %Y') }}<|eot_id|>"
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "<|eot_id|>{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ {'output': m.content} | tojson }}<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (  # ids of nine characters; the tools stand before the last question; no header for the assistant
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
HERMES = (  # calls without a text next to them, results that need a name
    TOOLS_TEXT + "{% for m in messages %}{% if m.role == 'tool' %}{% if m.name is not defined %}"
    "{{ raise_exception('a result needs a name') }}{% endif %}<|im_start|>tool\n<tool_response>\n"
    '{"name": "{{ m.name }}", "content": {{ m.content | tojson }}}\n</tool_response> <|im_end|>\n'
    "{% elif m.tool_calls is defined %}<|im_start|>assistant{% for c in m.tool_calls %}{{ '\\n<tool_call>\\n' }}"
    '{ "arguments": {{ c.function.arguments | tojson }}, "name": "{{ c.function.name }}"}\n</tool_call> {% endfor %}'
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + QWEN_OPENS
)
DEEPSEEK = (  # arguments have to be text
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<|tool|>{{ m.content }}{% else %}<|Assistant|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<|call|>' + c.function.name + ' ' + c.function.arguments }}{% endfor %}"
    "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
GEMMA = (  # refuses all but users and assistants
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
TEMPLATES = {
    "qwen2.5": QWEN25, "qwen3": QWEN3, "qwq": QWQ, "llama3.1": LLAMA31, "mistral": MISTRAL, "hermes": HERMES,
    "deepseek": DEEPSEEK, "gemma": GEMMA,
}  # fmt: skip
SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "<|User|>", "<|Assistant|>", "<|tool|>", "<|call|>", "<start_of_turn>", "<end_of_turn>",
]  # fmt: skip
OTHER = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def make_model_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A token for every byte and for the marks of all templates."""
    core = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    core.add_tokens(OTHER)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer
