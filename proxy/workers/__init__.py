"""The prefill and decode workers behind the proxy."""
