"""Conversations, tools and templates that several tests of this folder use."""

END = 4  # <|im_end|> of the tiny tokenizer
TWO_TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "6"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "a", "parameters": {"type": "object", "properties": {"p": {"type": "string"}}}},
    }
]
CALL = {"type": "function", "function": {"name": "find", "arguments": {"q": "x"}}}
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST] ' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
STRIPS_THOUGHTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' and not loop.last else m['content'] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
THOUGHTS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "<think>A</think>one"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "<think>B</think>two"},
]


def answered(question, answer, **more):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer} | more]
