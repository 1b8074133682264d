"""Templates in the styles that models come with, and conversations to render with them."""

from __future__ import annotations

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system<|im_end|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|endoftext|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|im_start|>' + message['role'] + '<|im_end|>\\n\\n' + message['content'] | trim }}
        {{- '<|endoftext|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant<|im_end|>\\n\\n' }}
{%- endif %}
"""

ALTERNATING = """{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'].strip() + eos_token }}
    {%- endif %}
{%- endfor %}
"""

THINKING = """{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- set reasoning = '' %}
    {%- if message.reasoning_content is string %}
        {%- set reasoning = message.reasoning_content %}
    {%- elif '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {%- if reasoning and loop.index0 > ns.last %}
        {{- '<|im_start|>' ~ message.role ~ '\\n<think>\\n' ~ reasoning.strip('\\n') }}
        {{- '\\n</think>\\n\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

FEATURES = """{%- macro show(value, mark='-') -%}
    {{ mark }}{{ value | tojson }}{{ value | tojson(indent=2) }}
{%- endmacro -%}
{% generation %}{{ show({'a': [1, '<é&"']}) }}{% endgeneration %}
{% for role, group in messages | groupby('role') %}
{{ role | upper }}: {{ group | map(attribute='content') | join(', ') | replace('a', '<a>') }}
{% endfor %}
{{ '%s/%5.2f' | format('x', 1.5) }} {{ "%d" % 7 }} {{ '{:>6}'.format('r') }} {{ 'ab'.center(6) }}
{{ 'one\\ntwo' | indent(4) }} {{ ', '.join(['x', 'y']) }} {{ 7 ~ None ~ true }} {{ [1, 2] * 2 }}
{{ range(2, 9, 3) | list }} {{ dict(a=1).items() | list }} {{ missing }} {{ tools is none }}
{% for n in range(9) %}{% if n == 2 %}{% continue %}{% endif %}{{ loop.last }}{{ n }}{% endfor %}
{% for item in [1, [2, [3]]] recursive %}
{%- if item is number %}{{ item }}{% else %}{{ loop(item) }}{% endif %}{% endfor %}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ 2 ** 10 }} {{ 'a' * 3 }}
"""

TEMPLATES = {
    "chatml": CHATML,
    "llama_3": LLAMA_3,
    "alternating": ALTERNATING,
    "thinking": THINKING,
    "features": FEATURES,
}

CONVERSATIONS = [
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "user", "content": "  Wie geht's? 😀 \n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nGut, danke. < > </ <|"},
        {"role": "user", "content": "日本語は?\t{{ 1 + 1 }} {% raw %}"},
    ],
    [
        {"role": "user", "content": "a<|b|>c"},
        {"role": "assistant", "content": "answer", "reasoning_content": "because\n"},
        {"role": "user", "content": ""},
    ],
]
SYSTEM = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi <|im_"}]
