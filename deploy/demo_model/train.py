"""Train the demo model: a Qwen3 of 3.7 million parameters that writes verse, small enough for the repository.

    python deploy/demo_model/train.py TEXT OUT_DIR [--device cpu --steps 20]

Reads a plain text file and writes a Hugging Face model directory. The model has bfloat16 weights and a tokenizer, at
most 8 MB. Needs only torch, transformers, tokenizers and numpy; takes a few minutes on a GPU. Two runs with equal seeds
on a machine see equal batches. Blank lines separate speeches. Documents are runs of speeches ended by `<|endoftext|>`,
so the model learns to stop.
"""

import argparse
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

CHAT_TEMPLATE = r"""{%- set names = {"user": "ROMEO:\n", "assistant": "JULIET:\n", "tool": "Messenger:\n"} -%}
{%- if tools -%}
{{- 'To call one of these, write <tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>:\n' -}}
{%- for tool in tools -%}{{- tool.function | tojson + "\n" -}}{%- endfor -%}
{{- "\n" -}}
{%- endif -%}
{%- for message in messages -%}
{{- names.get(message.role, "") + message.content -}}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments -%}
{{- "\n" if message.content or not loop.first -}}
{{- '<tool_call>\n{"name": ' + call.function.name | tojson + ', "arguments": ' -}}
{{- (arguments if arguments is string else arguments | tojson) + "}\n</tool_call>" -}}
{%- endfor -%}
{{- "\n\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "JULIET:\n" -}}{%- endif -%}
"""
"""The model knows plays only, so a chat is a dialogue in a play. It calls a tool where a request forces a call."""
EOS = "<|endoftext|>"
EOS_ID = 0
VOCAB_SIZE = 2048
MAX_LEN = 2048
CROP_LENS = (128, 256, 512, 1024, 2048)  # tokens; drawn for each batch, so every position is trained
HELD_OUT = 0.05  # the end of the text, never trained on
MAX_DIRECTORY_BYTES = 8_000_000
PROMPT = "ROMEO:\nBut soft, what light"


@dataclass(frozen=True)
class Corpus:
    """Token ids of both splits; `starts` are positions in `train` at which speeches begin."""

    train: np.ndarray  # [num_train_tokens] int64
    held_out: np.ndarray  # [num_held_out_tokens] int64
    starts: np.ndarray  # [num_speeches] int64


def split_speeches(text: str) -> list[str]:
    return [speech.strip("\n") for speech in text.split("\n\n") if speech.strip()]


def train_tokenizer(text: str) -> Tokenizer:
    """Train byte-level BPE: any text can be encoded, and `<|endoftext|>` has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def encode_speeches(tokenizer: Tokenizer, speeches: list[str], rng: random.Random) -> tuple[list[int], list[int]]:
    """Return token ids of all speeches in order, and the begin of each; about every tenth speech ends a document."""
    ids: list[int] = []
    starts = []
    for speech in speeches:
        starts.append(len(ids))
        ends_document = rng.random() < 0.1
        ids += tokenizer.encode(speech if ends_document else speech + "\n\n").ids
        if ends_document:
            ids.append(EOS_ID)
    return ids, starts


def build_corpus(text: str, seed: int) -> tuple[Tokenizer, Corpus]:
    speeches = split_speeches(text)
    num_held_out = max(1, int(len(speeches) * HELD_OUT))
    kept, held_out = speeches[:-num_held_out], speeches[-num_held_out:]
    if not kept:
        raise SystemExit("the text has fewer than two paragraphs: nothing is left to train on")
    tokenizer = train_tokenizer("\n\n".join(kept))
    rng = random.Random(seed)
    train_ids, starts = encode_speeches(tokenizer, kept, rng)
    held_out_ids, _ = encode_speeches(tokenizer, held_out, rng)
    return tokenizer, Corpus(np.array(train_ids), np.array(held_out_ids), np.array(starts))


def draw_batch(corpus: Corpus, num_tokens: int, rng: np.random.Generator) -> torch.Tensor:
    """Draw random crops of a random length, half of them from the start of a speech: [num_crops, crop_len] int64."""
    allowed = [length for length in CROP_LENS if length < len(corpus.train)] or [len(corpus.train) - 1]
    crop_len = int(rng.choice(allowed))
    num_crops = max(1, num_tokens // crop_len)
    last = len(corpus.train) - crop_len
    anywhere = rng.integers(0, last + 1, num_crops)
    at_speech = np.minimum(rng.choice(corpus.starts, num_crops), last)
    begins = np.where(rng.random(num_crops) < 0.5, at_speech, anywhere)
    return torch.from_numpy(np.stack([corpus.train[begin : begin + crop_len] for begin in begins]))


def build_model(vocab_size: int, dropout: float) -> Qwen3ForCausalLM:
    """Build an ordinary Qwen3; dropout on every residual branch is a training-time hook, not part of the model."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LEN,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    model = Qwen3ForCausalLM(config)

    def drop(module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(output, dropout, training=module.training)

    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "o_proj", "down_proj")):
            module.register_forward_hook(drop)
    return model


def next_token_loss(model: Qwen3ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return mean cross-entropy in nats; `ids` [num_crops, crop_len] int64 on the model's device."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.device.type == "cuda"):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits  # [num_crops, crop_len - 1, vocab]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Qwen3ForCausalLM, corpus: Corpus, device: torch.device) -> float:
    """Return the mean loss over the held-out text in windows of 512 tokens."""
    window = min(512, len(corpus.held_out))
    num_windows = len(corpus.held_out) // window
    ids = torch.from_numpy(corpus.held_out[: num_windows * window]).view(num_windows, window)
    model.eval()
    total = 0.0
    for first in range(0, num_windows, 16):
        part = ids[first : first + 16].to(device)
        total += next_token_loss(model, part).item() * len(part)
    model.train()
    return total / num_windows


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the rate of a step: linear warm-up over 3 % of the steps, then a cosine to a twentieth of the peak."""
    warmup_steps = max(1, args.steps * 3 // 100)
    if step < warmup_steps:
        return float(args.lr * (step + 1) / warmup_steps)
    progress = (step - warmup_steps) / max(1, args.steps - warmup_steps)
    return float(args.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))))


def make_optimizer(model: Qwen3ForCausalLM) -> torch.optim.AdamW:
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    norms = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


class Keeper:
    """Latest weights with a held-out loss within `slack` nats of the best.

    The lowest held-out loss alone stops too early on a small text. Verse goes on getting better for a while as the
    model leans on memorized text. Past the slack the model only recites.
    """

    def __init__(self, slack: float) -> None:
        self.slack = slack
        self.best = math.inf
        self.kept_loss = math.inf
        self.kept_step = 0
        self.weights: dict[str, torch.Tensor] = {}

    def offer(self, step: int, loss: float, model: Qwen3ForCausalLM) -> None:
        self.best = min(self.best, loss)
        if loss <= self.best + self.slack:
            self.kept_loss, self.kept_step = loss, step
            self.weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}

    def is_hopeless(self, loss: float) -> bool:
        """Tell whether the held-out loss has risen too far for any later step to come back."""
        return loss > self.best + 2 * self.slack


def fit(model: Qwen3ForCausalLM, corpus: Corpus, args: argparse.Namespace, device: torch.device) -> None:
    """Train in place; the model ends with the weights chosen by `Keeper`."""
    optimizer = make_optimizer(model)
    rng = np.random.default_rng(args.seed)
    keeper = Keeper(args.slack)
    started_s = time.monotonic()
    model.train()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        loss = next_token_loss(model, draw_batch(corpus, args.batch_tokens, rng).to(device))
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
            held_out = held_out_loss(model, corpus, device)
            keeper.offer(step + 1, held_out, model)
            elapsed_s = time.monotonic() - started_s
            print(
                f"step {step + 1:5d}/{args.steps}  train {loss.item():.3f}  held out {held_out:.3f}  {elapsed_s:.0f} s",
                flush=True,
            )
            if keeper.is_hopeless(held_out):
                break
    model.load_state_dict(keeper.weights)
    print(f"kept step {keeper.kept_step}: held out {keeper.kept_loss:.3f}, best {keeper.best:.3f}")


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out_dir: Path) -> None:
    """Write the model directory; exit if the directory is too large for the repository."""
    out_dir.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, do_sample=True, temperature=0.8, top_p=0.95)
    model.to(torch.bfloat16).save_pretrained(out_dir)
    _write_plain_config(out_dir / "config.json")
    tokenizer.save(str(out_dir / "tokenizer.json"), pretty=False)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "model_max_length": MAX_LEN,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out_dir / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    size_bytes = sum((out_dir / name).stat().st_size for name in names)
    print(f"{out_dir}: {size_bytes / 1e6:.2f} MB")
    if size_bytes > MAX_DIRECTORY_BYTES:
        raise SystemExit(f"{size_bytes} bytes; at most {MAX_DIRECTORY_BYTES}: make the model smaller")


def _write_plain_config(path: Path) -> None:
    """Rename keys of the config as in published Qwen3 checkpoints, which every loader reads."""
    config = json.loads(path.read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def show_sample(model: Qwen3ForCausalLM, tokenizer: Tokenizer, device: torch.device) -> None:
    ids = torch.tensor([tokenizer.encode(PROMPT).ids], device=device)
    model.eval()
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, do_sample=True)
    print(tokenizer.decode(output[0].tolist()))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="plain text; blank lines separate speeches")
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--slack", type=float, default=0.1, help="held-out loss given up for fluency, in nats")
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    tokenizer, corpus = build_corpus(args.text.read_text(encoding="utf-8"), args.seed)
    model = build_model(tokenizer.get_vocab_size(), args.dropout).to(device)
    num_parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{num_parameters:,} parameters; {len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} held out")
    fit(model, corpus, args, device)
    save(model, tokenizer, args.out_dir)
    show_sample(model, tokenizer, device)


if __name__ == "__main__":
    main()
