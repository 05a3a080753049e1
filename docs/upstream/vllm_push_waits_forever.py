"""vLLM push mode: a decode request whose prefill never comes waits on; aborted it keeps its blocks.

    python vllm_push_waits_forever.py PREFILL_URL DECODE_URL MODEL

Two workers with NixlPushConnector, decode with "push_registration_timeout": 5. Prints what share of
decode's KV blocks is in use.
"""

import json
import re
import sys
import time
import urllib.request

prefill, decode, model = sys.argv[1:]
PROMPT = list(range(5, 205))
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def ask(url: str, name: str, transfer: dict[str, object], timeout: float = 60) -> dict[str, object]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": transfer}
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return dict(json.load(answer))


def in_use() -> str:
    with urllib.request.urlopen(decode + "/metrics") as page:
        return re.findall(r"^vllm:kv_cache_usage_perc\S* (\S+)", page.read().decode(), re.M)[0]


handle = ask(prefill, "first", PREFILL)["kv_transfer_params"]
ask(decode, "first", handle)
print("after a turn:", in_use())
try:
    ask(decode, "alone", {**handle, "remote_request_id": "alone"}, timeout=15)
except TimeoutError:
    print("no answer in 15 s, three times the timeout; the request is aborted")
for seconds in (1, 10):
    time.sleep(seconds)
    print("blocks in use afterwards:", in_use())
ask(prefill, "alone", PREFILL)
time.sleep(2)
print("after a prefill with the same id:", in_use())
