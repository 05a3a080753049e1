#!/usr/bin/env bash
# vLLM: an engine that only keeps blocks for a KV connector steps 1,000 times a second.
# Usage: vllm_pinned_engine_spins.sh MODEL [PORT]. Linux; prints the CPU use of one worker, without
# a peer: idle, then for 30 s with the blocks of one finished request kept, then idle again.
set -euo pipefail
model=$1 port=${2:-8123}
python -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name m --port "$port" \
    --dtype float32 --enforce-eager --max-model-len 1024 --kv-transfer-config \
    '{"kv_connector":"NixlConnector","kv_role":"kv_producer","kv_buffer_device":"cpu"}' \
    >worker.log 2>&1 &
server=$!
trap 'kill "$server"; wait "$server" || true' EXIT
until curl -sf "localhost:$port/health" >/dev/null; do kill -0 "$server"; sleep 1; done

descendants() { local child; echo "$1"; for child in $(pgrep -P "$1"); do descendants "$child"; done; }
ticks() {
    local process
    for process in $(descendants "$server"); do
        sed 's/.*) //' "/proc/$process/stat" 2>/dev/null || true
    done | awk '{ sum += $12 + $13 } END { print sum }'
}
show() {
    local before after
    before=$(ticks); sleep 5; after=$(ticks)
    echo "$1: $(( (after - before) * 100 / 5 / $(getconf CLK_TCK) )) % of a core"
}
sleep 5
show "idle"
curl -s "localhost:$port/v1/completions" -H 'content-type: application/json' -o /dev/null -d \
    '{"model":"m","prompt":"hello","max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}'
sleep 2
show "blocks of one request kept"
sleep 35
show "idle again"
