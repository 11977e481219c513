"""Fields of /v1/completions: OpenAI's fields, and additions known from vLLM.

`GENERATION_FIELDS` also belong to /v1/chat/completions (`chat_fields`). An unimplemented field with an effect on the
text is refused, never ignored. The rule of such a field is `only`, which allows values without effect. The list in
docs/api.md is made of the table (`python -m router.api.field_tables`).
"""

from common.wire.values.output_token import MAX_LOGPROBS
from common.wire.values.sampling_params import MAX_ALLOWED, MAX_BAD_WORDS, MAX_BIASED, MAX_STOP_TOKENS, MAX_WORD_TOKENS
from router.base.json_fields import Field, Table, given, object_of, without
from router.base.json_rules import BOOLEAN, integer, number, one_of, only, string, strings
from router.requests.logit_bias import logit_bias
from router.requests.structured_fields import STRUCTURED_FIELDS
from router.text.prompts import DEFAULT_MAX_TOKENS, PROMPTS, token_ids
from router.text.server_rules import MODEL_NAME, NUM_KEPT, PRIORITY
from router.text.stop_strings import MAX_STOP_CHARS, MAX_STOPS

MAX_N = 128
MAX_USER_CHARS = 512
MAX_TOP_K = 1 << 30
MAX_MAX_TOKENS = 1 << 30
MAX_WORDS_CHARS = 4096
MIN_TEMPERATURE = 1e-5
"""Least divisor to keep logits within float32; below, sampling is greedy anyway."""
MAX_STOP_IDS = MAX_STOP_TOKENS // 2  # the other half is for the model's own
TRUNCATION = "of longer prompts so many tokens are kept, of texts from at most 16 characters a token; -1: what fits"
MAX_TOKENS_ABOUT = (
    "of each text at most; refused if prompt and `max_tokens` exceed the context, as OpenAI does; 0 with `echo` only"
)
REPETITION = "positive logits of tokens that prompt or text have are divided by it, others multiplied with it"
SPECIAL_TOKENS = "the tokens that the model puts around a text, as BOS, are put there"
LOGPROBS = (
    "how likely each token was, and so many of the likeliest; before anything changed logits; with `echo`: of "
    "the prompt's, too, bounded as `prompt_logprobs`"
)
PROMPT_LOGPROBS = (
    "the same of each prompt token, by ids, with ranks; not with `stream`; for up to 131,072 numbers of prompt tokens, "
    "times `n`"
)
TOKEN_IDS = "`token_ids` in each choice, and `prompt_token_ids`, which a chat has once; bounded as `echo`"
PRIORITY_ABOUT = "lower goes first, always; below `router.min_priority`, which is 0 unless set, it is refused"
BAD_WORDS = f"the text has none of them, with a space before or without, each of at most {MAX_WORD_TOKENS} tokens"
CACHE_SALT = string(128, min_chars=1, without="@/\\\0")

STREAM_OPTIONS = Table(
    Field("include_usage", BOOLEAN, False, "a last chunk with the numbers of tokens"),
    Field("continuous_usage_stats", BOOLEAN, False, "in each chunk, too, those of its choice"),
    Field("include_obfuscation", BOOLEAN, False, "taken, without effect: no padding is sent"),
)

GENERATION_FIELDS = (
    Field("model", MODEL_NAME, None, "the served model's name; another one is a 404"),
    Field("temperature", number(0, 2, zero_below=MIN_TEMPERATURE), 1.0, "0 is greedy, and what is below 0.00001"),
    Field("top_p", number(0, 1, above_low=True), 1.0, "the likeliest tokens that have this much probability together"),
    Field("top_k", integer(-1, MAX_TOP_K), 0, "the k likeliest tokens; 0 and -1: all"),
    Field("min_p", number(0, 1), 0.0, "tokens at least this likely beside the likeliest"),
    Field("seed", integer(-(1 << 63), (1 << 63) - 1), None, "equal requests with equal seeds get equal texts"),
    Field("presence_penalty", number(-2, 2), 0.0, "off the logits of tokens that the text has"),
    Field("frequency_penalty", number(-2, 2), 0.0, "the same, for each time that the text has them"),
    Field("repetition_penalty", number(0.001, 1000), 1.0, REPETITION),
    Field("logit_bias", logit_bias(MAX_BIASED), {}, "added to the logits of tokens"),
    Field("allowed_token_ids", token_ids(MAX_ALLOWED, min_ids=1), None, "no other tokens are chosen"),
    Field("bad_words", strings(MAX_BAD_WORDS // 2, MAX_WORDS_CHARS), (), BAD_WORDS),
    Field("min_tokens", integer(0, MAX_MAX_TOKENS), 0, "nothing but `max_tokens` ends the text before"),
    Field("stop", strings(MAX_STOPS, MAX_STOP_CHARS, or_one=True), (), "the text ends before the first of them"),
    Field("include_stop_str_in_output", BOOLEAN, False, "what ends the text is part of it"),
    Field("stop_token_ids", token_ids(MAX_STOP_IDS), (), "tokens that end the text, beside the model's own"),
    Field("ignore_eos", BOOLEAN, False, "the model's end-of-text tokens do not end the text"),
    Field("n", integer(1, MAX_N), 1, "texts for each prompt"),
    Field("stream", BOOLEAN, False, "server-sent events, a chunk a token"),
    Field("stream_options", object_of(STREAM_OPTIONS), None, "only with `stream`"),
    Field("truncate_prompt_tokens", NUM_KEPT, None, TRUNCATION),
    Field("truncation_side", one_of("left", "right"), "left", "where it is cut off"),
    Field("skip_special_tokens", BOOLEAN, True, "special tokens have no text"),
    Field("spaces_between_special_tokens", BOOLEAN, True, "taken, without effect: these tokenizers put none there"),
    Field("return_token_ids", BOOLEAN, False, TOKEN_IDS),
    Field("return_tokens_as_token_ids", BOOLEAN, False, "`logprobs` names tokens by their ids, `token_id:5`"),
    Field("cache_salt", CACHE_SALT, None, "nothing is used of prompts of other salts, no KV of those of other keys"),
    Field("user", string(MAX_USER_CHARS), "", "prompts of one user wait for each other, not for another's flood"),
    Field("priority", PRIORITY, 0, PRIORITY_ABOUT),
    Field("use_beam_search", only(False)),
    Field("length_penalty", only(1)),
    Field("logprob_token_ids", only()),
    Field("prompt_embeds", only(remedy="send the prompt as text or token ids")),
    Field("request_id", only(remedy="send it as the header X-Request-Id")),
    Field("extra_body", only(remedy="send what is in it beside the other fields, as the openai package does")),
    Field("stream_interval", only(1)),
    Field("kv_transfer_params", only(remedy="workers settle among themselves where KV blocks go")),
    *STRUCTURED_FIELDS,
)  # fmt: skip

STREAMED = {"anyOf": [without("stream_options"), given("stream", {"const": True})]}

COMPLETION_FIELDS = Table(
    Field("prompt", PROMPTS, None, "required"),
    Field("max_tokens", integer(0, MAX_MAX_TOKENS), DEFAULT_MAX_TOKENS, MAX_TOKENS_ABOUT),
    Field("add_special_tokens", BOOLEAN, True, SPECIAL_TOKENS),
    Field("echo", BOOLEAN, False, "the prompt stands before the text; for up to 262,144 prompt tokens times `n`"),
    *GENERATION_FIELDS,
    Field("best_of", integer(0, MAX_N), None, "0, 1 or what `n` is: no text is made and not returned"),
    Field("suffix", only("", remedy="the model does not fill in the middle")),
    Field("logprobs", integer(0, MAX_LOGPROBS), None, LOGPROBS),
    Field("prompt_logprobs", integer(0, MAX_LOGPROBS), None, PROMPT_LOGPROBS),
    Field("max_completion_tokens", only(remedy="send max_tokens")),
    relations=[
        STREAMED,
        {"anyOf": [without("prompt_logprobs"), {"properties": {"stream": {"enum": [False, None]}}}]},
        {"anyOf": [{"properties": {"max_tokens": {"not": {"const": 0}}}}, given("echo", {"const": True})]},
    ],
)
