"""What the model is taught about Penstock.

A change here, or in ``flags.json``, changes nothing in the model until it is trained anew: see
``demo/README.md``.
"""

from __future__ import annotations

import json
from pathlib import Path

from penstock.demo.skills.terms import COMMANDS, TERMS

QUESTIONS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("What is Penstock?", "What does Penstock do?", "Explain Penstock.", "Tell me about Penstock.",
      "What is this server?", "Can you explain what Penstock is?", "What is Penstock for?"),
     "Penstock serves large language models. It is a pipeline of small processes that exchange messages over ZeroMQ."),
    (("Who are you?", "What are you?", "What is your name?", "Introduce yourself.", "Which model are you?",
      "What model is this?", "Are you a language model?", "Tell me about yourself.", "What's your name?"),
     "I am penstock-demo, a small language model that ships with Penstock."),
    (("What can you do?", "What are you able to do?", "What are your skills?", "How can you help me?",
      "What do you know?", "What should I ask you?", "Help"),
     "I can calculate, sort, count, spell and reverse words, work with dates and units, extract JSON, call tools, "
     "tell short stories and answer questions about Penstock."),
    (("Where does the name Penstock come from?", "Why is it called Penstock?", "What is a penstock?",
      "What does the word penstock mean?", "Why the name Penstock?"),
     "A penstock is the pipe that brings water to a turbine under pressure. Penstock brings tokens to GPUs."),
    (("How do I start the server?", "How do I start Penstock?", "How can I run Penstock?", "How do I run the server?",
      "How do I serve a model?", "Which command starts the server?", "How to start Penstock?"),
     "Run `make serve`, or `penstock serve MODEL` with a folder of a Hugging Face model."),
    (("How do I serve my own model?", "How can I use my own model?", "How do I load a Hugging Face model?",
      "How do I serve another model?", "Can I use another model?"),
     "Give its folder: `make serve MODEL=/path/to/hf-folder`."),
    (("How do I run the tests?", "How can I test Penstock?", "Which command runs the tests?", "How do I test it?"),
     "Run `make test`."),
    (("Which models are supported?", "Which models does Penstock support?", "What models can Penstock serve?",
      "Which model families work?", "Can Penstock serve Llama?", "Can Penstock serve Qwen?"),
     "Llama 2 and 3, Qwen 2 and 2.5, and Qwen 3 (dense) are supported."),
    (("Does Penstock work with the OpenAI SDK?", "Is Penstock compatible with OpenAI?", "Can I use the OpenAI client?",
      "Which API does Penstock have?", "How do clients talk to Penstock?", "What API does the server speak?"),
     "Clients talk to Penstock as to OpenAI's API; the OpenAI SDK works unchanged."),
    (("Which endpoints are there?", "Which routes does the server have?", "What endpoints does Penstock have?",
      "List the endpoints.", "What URLs can I call?"),
     "/v1/chat/completions, /v1/completions, /v1/models, /live, /health, /ready, /metrics and /version."),
    (("How do I see all flags?", "How do I list the flags?", "Where are the flags explained?", "Which flags are there?",
      "How do I get help on the flags?"),
     "`penstock serve --help` lists every flag."),
    (("How do I set a flag in the environment?", "Are there environment variables?", "Which environment variables are there?",
      "How do I set an option without a flag?"),
     "Each flag is also an environment variable: --max-num-seqs is PENSTOCK_MAX_NUM_SEQS."),
    (("Can I use a config file?", "How do I use a configuration file?", "Is there a config file?",
      "Which formats can a config file have?"),
     "Yes: `--config FILE` reads TOML or YAML with the same keys as the flags."),
    (("What wins, flags or the environment?", "In which order is the configuration read?", "Which setting wins?",
      "Do flags win over the environment?"),
     "Flags win over the environment, which wins over the file, which wins over the defaults."),
    (("How do I see the configuration?", "How do I see where a value comes from?", "How do I print the settings?",
      "What does --show-config do?"),
     "`--show-config` prints each value and where it came from."),
    (("Does Penstock run on a CPU?", "Do I need a GPU?", "Can I run Penstock without a GPU?", "Does it need a GPU?"),
     "Penstock runs on CPUs and on GPUs; on a CPU, bfloat16 and float32 work."),
    (("Which processes does Penstock have?", "What processes are there?", "Which services are there?",
      "What are the parts of Penstock?", "What is the pipeline made of?", "Name the processes."),
     "Frontend, tokenizer, router, scheduler and worker; the launcher starts them."),
    (("How do the processes talk?", "How do the services communicate?", "What do the processes exchange?",
      "Which protocol do the processes use?", "Why ZeroMQ?"),
     "They exchange msgspec-encoded messages over ZeroMQ; every process owns exactly one inbox."),
    (("How do I stop the server?", "How do I end Penstock?", "How can I stop it?", "How do I shut the server down?"),
     "Press Ctrl-C once: the server finishes its requests and ends. A second time ends it at once."),
    (("How large are you?", "How many parameters do you have?", "How big are you?", "How big is this model?",
      "What is your size?"),
     "I have about nine million parameters, which is very small."),
    (("How were you trained?", "Who trained you?", "What were you trained on?", "Where does your knowledge come from?",
      "What is your training data?"),
     "I was trained on text that a seeded generator in the Penstock repository makes."),
    (("Are you a human?", "Are you a person?", "Are you real?", "Am I talking to a human?", "Are you a robot?"),
     "No, I am a small language model."),
    (("Which languages do you speak?", "Do you speak German?", "Can you speak French?", "Do you know other languages?",
      "Which language do you understand?"),
     "I only understand simple English."),
    (("Do you make mistakes?", "Can I trust you?", "Are you always right?", "Are your answers correct?"),
     "I am a small model and make mistakes. Please check what matters."),
    (("How do I measure the speed?", "How do I benchmark the server?", "How do I measure Penstock?",
      "Is there a load generator?", "How do I put load on the server?"),
     "Run `penstock bench serve` against a running server."),
    (("How do I check the quality?", "How do I measure your accuracy?", "How do I evaluate the model?",
      "How good are you?"),
     "Run `penstock eval`: it asks held-out questions and reports the accuracy of each skill."),
    (("How do I use an API key?", "How do I protect the server?", "How do I set an API key?", "Is there authentication?"),
     "Start the server with `--api-key KEY`; clients then send `Authorization: Bearer KEY`."),
    (("How do I use several GPUs?", "How do I run several engines?", "How do I scale Penstock?", "How do I add an engine?"),
     "`--data-parallel-size N` starts N engines, each a replica of the model."),
    (("What happens when a process dies?", "What if a worker crashes?", "Are requests lost when a process dies?",
      "Do requests survive a crash?"),
     "The launcher starts it again, and the requests go on: no request ends with silence."),
    (("Which Python do I need?", "Which Python version is needed?", "What does Penstock need to run?"),
     "Linux with Python 3.11 or newer, and make."),
    (("Where is the documentation?", "Where can I read more?", "Is there documentation?", "Where are the docs?"),
     "In the folder docs: architecture.md, api.md, benchmarks.md and more."),
    (("How do I see metrics?", "Are there metrics?", "Does Penstock export Prometheus metrics?", "Where are the metrics?"),
     "GET /metrics is Prometheus text for all processes together."),
    (("How do I stream an answer?", "Does Penstock stream?", "How do I get tokens as they come?", "How does streaming work?"),
     "Send `\"stream\": true`; the answer comes as server-sent events, `[DONE]` last."),
)  # fmt: skip

MORE_QUESTIONS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("what can I ask you", "what are you good at", "What can I do here?", "help me", "what do you do",
      "How do I use this?", "What are you capable of?", "What can I ask?", "What can this model do?"),
     QUESTIONS[2][1]),
    (("Who is this?", "whats your name", "what model are you", "What kind of model are you?", "are you an AI",
      "Are you ChatGPT?", "Are you GPT-4?", "which LLM is this", "Are you an LLM?", "Who am I talking to?"),
     QUESTIONS[1][1]),
    (("What is this?", "What is this page?", "what does this server do", "What is this project?", "penstock?",
      "penstock", "What's Penstock about?", "Give me a summary of Penstock.", "Why should I use Penstock?"),
     QUESTIONS[0][1]),
    (("how to run it", "how do I run this", "How do I launch it?", "start server", "how to start the server",
      "How do I get started?", "how can I start penstock", "How do I install Penstock?", "how to install"),
     QUESTIONS[4][1]),
    (("supported models", "what models do you support", "Which models can I use?", "Does it support Qwen3?",
      "does it run llama", "What models work?", "Can it serve Llama 3?", "which architectures are supported"),
     QUESTIONS[7][1]),
    (("is it compatible with openai", "Does it have an OpenAI API?", "can I use the openai python client",
      "Which client can I use?", "openai api?"), QUESTIONS[8][1]),
    (("How do I run this on a GPU?", "How do I use a GPU?", "Can I run it on a GPU?", "does it run on cuda",
      "How do I choose the GPU?", "which flag chooses the device", "Does Penstock support CUDA?"),
     "`penstock serve --device cuda` runs on a GPU; without the flag, a GPU is used if there is one."),
    (("What is the default port?", "default port?", "Which port does the server use?", "On which port does it listen?",
      "What port is it?", "which port", "whats the default port", "what port", "port?"), "HTTP listens on port 8000; `--port` chooses another."),
    (("What is Penstock written in?", "Which language is Penstock written in?", "Which programming language is this?",
      "Is Penstock written in Rust?", "Is it written in Python?", "What is the code written in?"),
     "Penstock is written in Python, with GPU kernels in Triton."),
    (("What is the date today?", "What is today's date?", "What day is it today?", "which day is today",
      "What time is it?", "what time is it now", "what's the time", "What year is it?"),
     "I do not know that: I have no clock."),
    (("How do I stop it?", "how to stop the server", "stop the server", "how do I quit", "How do I kill it?"),
     QUESTIONS[18][1]),
    (("how fast are you", "How many tokens per second?", "How fast is Penstock?", "what is the throughput",
      "How do I test the speed?", "benchmark?"), QUESTIONS[24][1]),
    (("how many parameters", "How small are you?", "your size?", "how big is the model"), QUESTIONS[19][1]),
    (("where do you come from", "Who made you?", "Who built you?", "Who created you?", "what data were you trained on"),
     QUESTIONS[20][1]),
    (("do you need internet", "Do you need the internet?", "Are you online?", "Can you search the web?",
      "Do you run locally?", "Is my data sent somewhere?"),
     "I run on this server alone, without the internet."),
    (("You are wrong.", "that is wrong", "wrong", "This is not right.", "That's not correct."),
     QUESTIONS[23][1]),
)  # fmt: skip
"""Asked where the wording is free; most are new ways to ask for the answers above."""

SETTINGS: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "flags.json").read_text(encoding="utf-8")
)
"""What is taught of each setting: see ``penstock.demo.setting_facts``."""
FLAGS = {flag: facts["text"] for flag, facts in SETTINGS.items()}
DEFAULTS = {flag: facts["default"] for flag, facts in SETTINGS.items() if "default" in facts}
"""As people write them; empty: not set by default."""


def flag_answer(flag: str) -> str:
    """What a flag is for."""
    return f"{flag}: {FLAGS[flag]}"


def default_answer(flag: str) -> str:
    """What a setting is where nobody sets it."""
    if default := DEFAULTS[flag]:
        return f"The default of {flag} is {default}."
    return f"{flag} is not set by default."


def all_answers() -> list[str]:
    """Every answer about Penstock that the training text has, sorted."""
    found = {answer for _, answer in (*QUESTIONS, *MORE_QUESTIONS, *TERMS, *COMMANDS)}
    for flag in FLAGS:
        found |= {flag_answer(flag)} | ({default_answer(flag)} if flag in DEFAULTS else set())
    return sorted(found)
