"""[pure] The closed list of reasons: why a turn took the route that it took.

Every turn has exactly one. Metrics, the turn log, ``X-KVLoop-Reason`` and the dashboards show
these words and no others, so an operator who sees one can look it up here.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a turn was planned, or ended up, as it was."""

    # Reused.
    HISTORY_GREW = "history_grew"
    """The prompt extends everything decode computed: all of it is pulled."""
    HISTORY_CUT = "history_cut"
    """The prompt departs from what decode computed: the verified common part is pulled."""

    SHORT_APPEND = "short_append"
    """The new part is short, and too little is known of the routes' costs to compare them: decode
    computes it behind the history that it still has."""
    APPEND_CHEAPEST = "append_cheapest"
    """Decode is expected to compute the new part sooner than prefill could pull the history."""

    # Nothing to reuse.
    NEW_SESSION = "new_session"
    """No stored handle for this conversation or token prefix (first turn, long ago, or in use)."""
    HISTORY_DIVERGED = "history_diverged"
    """A handle was found, but too few leading tokens are equal; it was released."""
    BELOW_THRESHOLD = "below_threshold"
    """The common part is shorter than a pull is worth."""
    CLAIM_LOST = "claim_lost"
    """Another turn, or another proxy, claimed the handle first."""
    DECODE_KEPT_NOTHING = "decode_kept_nothing"
    """The last turn ended without a handle: stop string, abort, or decode not bidirectional."""
    STREAM_WITHOUT_HANDLE = "stream_without_handle"
    """The last turn was streamed by a decode worker without the kvloop plugin."""
    PIN_REFUSED = "pin_refused"
    """Decode would not keep the last turn's blocks: its share for retained KV is full."""
    EVICTED = "evicted"
    """What decode kept was given up for something likelier to be used: the retention budget."""
    LEASE_EXPIRED = "lease_expired"
    """The turn came later than decode was asked to keep the blocks."""
    TOKENS_UNKNOWN = "tokens_unknown"
    """The last turn's handle came without token ids that account for its KV."""

    # May not be reused.
    REUSE_DISABLED = "reuse_disabled"
    """Switched off: ``kvloop reuse off``, or KVLOOP_REUSE_ENABLED=false."""
    MEDIA = "media"
    """Messages hold images or other media: equal token ids do not mean equal KV."""
    NOT_TOKENISED = "not_tokenised"
    """The worker could not say which token ids this request has, so nothing can be verified. If the
    worker cuts the prompt itself (``truncate_prompt_tokens``), decode serves the turn alone."""
    UNCUTTABLE = "uncuttable"
    """Cutting is needed and not possible: several KV-cache groups, or unknown block size."""
    DECODE_RESTARTED = "decode_restarted"
    """The decode worker that held the blocks has restarted or left."""
    TABLE_UNAVAILABLE = "table_unavailable"
    """Redis did not answer in time."""
    PULL_BLOCKED = "pull_blocked"
    """Pulls to this prefill worker failed lately and are paused."""
    PAIR_MISMATCH = "pair_mismatch"
    """The prefill and the decode worker cannot exchange blocks; /ready shows why."""
    COLD_CHEAPEST = "cold_cheapest"
    """Prefill is expected to have the prompt computed before it could pull; the handle was
    released."""

    # Workers that push: nothing flows back.
    PUSH_ONE_WAY = "push_one_way"
    """The workers run NixlPushConnector: prefill writes into decode, and both start together. vLLM
    refuses bidirectional transfer there, so no history can flow back and nothing is kept."""
    PUSH_IN_TURN = "push_in_turn"
    """The same, but decode starts when prefill has answered: where this prefill worker's writes
    come from is not known yet, it has several engines, it failed lately, or decode has a queue; or
    ``push_together`` is off."""
    PUSH_FOUND = "push_found"
    """Prefill's answer was the first to say that it pushes, and decode cannot pair with it: decode
    computed the prompt itself. Once for each start of a prefill worker without /server_info."""

    # Performed differently from the plan.
    PULL_FAILED = "pull_failed"
    """The warm prefill failed or timed out; the turn was prefilled cold instead."""

    DECODE_RETRIED = "decode_retried"
    """Decode failed before any content; the turn was prefilled again, cold, and decoded elsewhere
    if there was an elsewhere."""

    # One worker does it all.
    TRANSFER_BLOCKED = "transfer_blocked"
    """Reads of this decode worker from prefill failed lately and are paused."""
    MULTIPLE_CHOICES = "multiple_choices"
    """n > 1 or beam search: one handle cannot serve several sequences."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """Log-probabilities of prompt tokens (or echo): decode never runs the prompt."""
    MULTIPLE_PROMPTS = "multiple_prompts"
    """Several prompts in one request: one handle names the blocks of one."""
    PREVIOUS_RESPONSE = "previous_response"
    """The history is in the memory of the decode worker that holds the previous response."""
    BACKGROUND = "background"
    """A response that is made in the background: its end is not seen from here."""
    BUILTIN_TOOLS = "builtin_tools"
    """Tools that the worker itself runs: it generates several times for one request."""
    NO_PREFILL_WORKER = "no_prefill_worker"
    """No prefill worker is healthy, or none can hand blocks to the decode worker."""
    PREFILL_FAILED = "prefill_failed"
    """Prefill failed cold as well; decode computed the prompt itself."""
    PREFILL_KEPT_NOTHING = "prefill_kept_nothing"
    """Prefill answered without a handle; decode computed the prompt itself."""
