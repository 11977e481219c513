"""The clients: what each needs, what it is made to do, and what must be seen."""

import json
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.environments import Environment, Kind

NUM_REQUESTS = 8
INPUT_TOKENS = 32
OUTPUT_TOKENS = 16
STOPS = ("\n", "Question:", "</s>", "Q:", "\n\n", "<|im_end|>")
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LOAD = "load of 2 streams on"
LOOP = "functions called and answered"
WORDS = ("moon", "night", "sword", "letter", "prince", "grave")
VERSE, ENDING = (Path(__file__).with_name(f"{task}.yaml") for task in ("verse", "ending"))


@dataclass(frozen=True, slots=True)
class Server:
    """The one under test."""

    url: str
    model: str
    directory: Path  # of the model


Run = Callable[[Environment, Server, Path], str]
"""Uses a client, with a directory for its files, and says what was seen; raises when it is not as it should be."""


@dataclass(frozen=True, slots=True)
class Case:
    """One client."""

    name: str  # the client's, and perhaps what it is used for
    requirements: tuple[str, ...]
    does: str
    run: Run
    kind: Kind = "python"

    @property
    def client(self) -> str:
        """What is installed, the same for all its uses."""
        return self.name.split()[0]


def program(name: str) -> Run:
    """One of `programs/`, which is given the URL and the model's name and checks by itself."""
    return lambda environment, server, _: environment.run_program(name, server.url, server.model)


def lm_eval_generate(environment: Environment, server: Server, directory: Path) -> str:
    """Its exact match is 1 when each answer is what the server says to a plain request."""
    documents = [{"line": line, "rest": _text(server, line)} for line in _lines()]
    score = _lm_eval(environment, server, directory, VERSE, documents)["exact_match,none"]
    assert score == 1.0, f"exact match {score}"
    return f"exact match 1.0 of {len(documents)} texts, {len(STOPS)} stop strings each"


def lm_eval_chat(environment: Environment, server: Server, directory: Path) -> str:
    """The same in chats."""
    documents = [{"line": line, "rest": _text(server, line, is_chat=True)} for line in _lines()]
    score = _lm_eval(environment, server, directory, VERSE, documents, is_chat=True)["exact_match,none"]
    assert score == 1.0, f"exact match {score}"
    return f"exact match 1.0 of {len(documents)} answers, {len(STOPS)} stop strings each"


def lm_eval_choose(environment: Environment, server: Server, directory: Path) -> str:
    """Its accuracy is 1 when what the server says itself is likelier to it than the same words in another order."""
    documents = []
    for i, line in enumerate(_lines()):
        said = _text(server, line)
        endings = [" ".join(reversed(said.split())), said.upper(), said[::-1]]
        endings.insert(i % 4, said)
        documents.append({"line": line, "endings": endings, "said": i % 4})
    score = _lm_eval(environment, server, directory, ENDING, documents)["acc,none"]
    assert score == 1.0, f"accuracy {score}"
    return f"accuracy 1.0 of {len(documents)} texts with 4 endings each"


def lm_eval(environment: Environment, server: Server, directory: Path) -> str:
    """Both kinds of task."""
    return "; ".join(run(environment, server, directory) for run in (lm_eval_generate, lm_eval_choose))


def _lines() -> list[str]:
    return [f"ROMEO: The {word} is" for word in WORDS]


def _lm_eval(
    environment: Environment,
    server: Server,
    directory: Path,
    task: Path,
    documents: list[dict[str, Any]],
    *,
    is_chat: bool = False,
) -> dict[str, float]:
    """Its metrics of a task over the documents."""
    (directory / f"{task.stem}.jsonl").write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
    (directory / task.name).write_text(task.read_text(encoding="utf-8"), encoding="utf-8")
    model_args = {
        "model": server.model, "base_url": f"{server.url}{CHATS if is_chat else COMPLETIONS}",
        "tokenizer": server.directory,
        "tokenizer_backend": "huggingface", "num_concurrent": 2, "max_retries": 1, "max_length": 512,
    }  # fmt: skip
    environment.run(
        [
            "lm_eval", "run", "--model", f"local-{'chat-' if is_chat else ''}completions",
            "--model_args", _joined(model_args),
            *(["--apply_chat_template"] if is_chat else []),
            "--tasks", task.name, "--include_path", ".", "--output_path", task.stem,
        ],
        cwd=directory,
        more={"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    )  # fmt: skip
    (results,) = directory.glob(f"{task.stem}/**/results_*.json")
    metrics: dict[str, float] = json.loads(results.read_text(encoding="utf-8"))["results"][task.stem]
    return metrics


def guidellm(path: str) -> Run:
    """Every request to an endpoint succeeds with the tokens asked for, by the usage that the server sends."""

    def run(environment: Environment, server: Server, directory: Path) -> str:
        backend = {"kind": "openai_http", "target": server.url, "model": server.model, "request_format": path}
        data = {"kind": "synthetic_text", "prompt_tokens": INPUT_TOKENS, "output_tokens": OUTPUT_TOKENS}
        environment.run(
            [
                "guidellm", "run", "--backend", _joined(backend), "--profile", "kind=concurrent,streams=2",
                "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
                "--tokenizer", f"kind=huggingface_auto,model={server.directory}", "--data", _joined(data),
                "--output", "kind=json,path=report.json", "--disable-console-interactive",
            ],
            cwd=directory,
        )  # fmt: skip
        (benchmark,) = json.loads((directory / "report.json").read_text(encoding="utf-8"))["benchmarks"]
        requests = benchmark["requests"]
        assert not requests["errored"], f"{len(requests['errored'])} requests failed"
        tokens = {request["output_metrics"]["text_tokens"] for request in requests["successful"]}
        assert (len(requests["successful"]), tokens) == (NUM_REQUESTS, {OUTPUT_TOKENS}), f"output tokens {tokens}"
        return _all_answered()

    return run


def aiperf(kind: str) -> Run:
    """The same, by its own report, of one of its kinds of endpoint."""

    def run(environment: Environment, server: Server, directory: Path) -> str:
        environment.run(
            [
                "aiperf", "profile", "--model", server.model, "--url", server.url, "--endpoint-type", kind,
                "--streaming", "--tokenizer", server.directory, "--concurrency", "2",
                "--request-count", str(NUM_REQUESTS), "--isl", str(INPUT_TOKENS), "--osl", str(OUTPUT_TOKENS),
                "--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--output-artifact-dir", "out",
                "--ui", "none",
            ],
            cwd=directory,
        )  # fmt: skip
        report = json.loads((directory / "out" / "profile_export_aiperf.json").read_text(encoding="utf-8"))
        seen = (report["request_count"]["avg"], report["output_sequence_length"]["avg"])
        assert seen == (NUM_REQUESTS, OUTPUT_TOKENS), f"requests and output tokens {seen}"
        return _all_answered()

    return run


def vllm_bench(environment: Environment, server: Server, directory: Path) -> str:
    """The same, by its result file; the model's name is asked of the server."""
    environment.run(
        [
            "vllm", "bench", "serve", "--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions",
            "--tokenizer", server.directory, "--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS),
            "--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "2",
            "--ignore-eos", "--save-result", "--result-filename", "result.json",
        ],
        cwd=directory,
    )  # fmt: skip
    result = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    seen = (result["completed"], result["total_output_tokens"])
    assert seen == (NUM_REQUESTS, NUM_REQUESTS * OUTPUT_TOKENS), f"requests and output tokens {seen}"
    return _all_answered()


def _all_answered() -> str:
    return f"{NUM_REQUESTS} of {NUM_REQUESTS} answered, {OUTPUT_TOKENS} tokens each"


def _joined(values: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in values.items())


def _text(server: Server, prompt: str, *, is_chat: bool = False) -> str:
    """What the server says to a plain request of the same kind."""
    asked = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    body = {"max_tokens": 24, "temperature": 0, "stop": STOPS, **asked}
    request = urllib.request.Request(
        server.url + (CHATS if is_chat else COMPLETIONS),
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        choice = json.load(response)["choices"][0]
    return str(choice["message"]["content"] if is_chat else choice["text"])


CASES = (
    Case(
        "openai-python tools",
        ("openai==3.52.0",),
        f"chats and responses: {LOOP}, by `create`, `stream` and `parse`; objects of a class",
        program("openai_tools.py"),
    ),
    Case(
        "openai-node",
        ("openai==7.55.0",),
        "whole, streamed with usage, `n`, `stop`, `logprobs`, a refusal, the models",
        program("openai_node.mjs"),
        kind="node",
    ),
    Case(
        "openai-node chat",
        ("openai==7.55.0",),
        "whole, streamed with usage, the helper `stream`, `n`, `stop`, `logprobs`, several turns, a refusal",
        program("openai_node_chat.mjs"),
        kind="node",
    ),
    Case(
        "openai-node tools",
        ("openai==7.55.0",),
        f"chats and responses: {LOOP}, by `create`, `stream`, `parse` and `runTools`; objects of a schema",
        program("openai_node_tools.mjs"),
        kind="node",
    ),
    Case(
        "langchain-openai",
        ("langchain-openai==1.7.3",),
        "`invoke`, `stream`, `batch`, `generate` with `n`, `best_of` and `logprobs`, `astream`",
        program("langchain_program.py"),
    ),
    Case(
        "langchain-openai chat",
        ("langchain-openai==1.7.3",),
        "`ChatOpenAI`: `invoke`, `stream`, `batch`, `generate` with `n`, `logprobs`, several turns, `astream`",
        program("langchain_chat_program.py"),
    ),
    Case(
        "litellm",
        ("litellm==1.106.2", "mcp==2.3.0"),
        "`text_completion` as `text-completion-openai/` and `hosted_vllm/`, streamed, asynchronous, a refusal",
        program("litellm_program.py"),
    ),
    Case(
        "litellm chat",
        ("litellm==1.106.2", "mcp==2.3.0"),
        "`completion` as `openai/` and `hosted_vllm/`, streamed, asynchronous, a refusal",
        program("litellm_chat_program.py"),
    ),
    Case(
        "litellm tools",
        ("litellm==1.106.2", "mcp==2.3.0"),
        f"`completion` as `openai/` and `hosted_vllm/`, whole and streamed, and `responses`: {LOOP}",
        program("litellm_tools.py"),
    ),
    Case(
        "langchain",
        ("langchain==1.4.7", "langchain-openai==1.7.3"),
        f"`ChatOpenAI` with chats and with responses: {LOOP}, `create_agent`, `with_structured_output`",
        program("langchain_tools.py"),
    ),
    Case(
        "instructor",
        ("instructor==1.17.0",),
        "modes `TOOLS`, `TOOLS_STRICT`, `JSON_SCHEMA`, `RESPONSES_TOOLS`, whole, `create_partial`, asked again",
        program("instructor_tools.py"),
    ),
    Case(
        "pydantic-ai",
        ("pydantic-ai-slim[openai]==2.68.0",),
        f"agents with `OpenAIChatModel` and `OpenAIResponsesModel`: {LOOP}, streamed, `ToolOutput`, `NativeOutput`",
        program("pydantic_ai_tools.py"),
    ),
    Case(
        "openai-agents",
        ("openai-agents==0.24.0",),
        f"agents with responses and with chats: {LOOP}, streamed, typed output, a handoff",
        program("openai_agents_tools.py"),
    ),
    Case(
        "lm-eval",
        ("lm-eval[api]==0.4.13", "transformers"),
        "`local-completions`, a task of kind `generate_until` and one of kind `multiple_choice`",
        lm_eval,
    ),
    Case(
        "lm-eval chat",
        ("lm-eval[api]==0.4.13", "transformers"),
        "`local-chat-completions`, a task of kind `generate_until`",
        lm_eval_chat,
    ),
    Case("guidellm", ("guidellm==0.8.1",), f"{LOAD} {COMPLETIONS}", guidellm(COMPLETIONS)),
    Case("guidellm chat", ("guidellm==0.8.1",), f"{LOAD} {CHATS}", guidellm(CHATS)),
    Case("aiperf", ("aiperf==0.13.0",), f"{LOAD} {COMPLETIONS}, metrics scraped", aiperf("completions")),
    Case("aiperf chat", ("aiperf==0.13.0",), f"{LOAD} {CHATS}, metrics scraped", aiperf("chat")),
    Case("vllm", ("vllm==0.33.0",), f"`vllm bench serve`, {LOAD} {COMPLETIONS}", vllm_bench),
)
