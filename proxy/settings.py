"""Every setting, typed, with its reason. One name in three places.

A setting ``prefill_urls`` is the environment variable ``KVLOOP_PREFILL_URLS``, the flag
``--prefill-urls`` and the key ``prefill_urls`` in the TOML file that ``KVLOOP_CONFIG`` names. Flags
beat the environment, the environment beats the file. A wrong value stops the start with a message
that names the setting.
"""

from __future__ import annotations

import os
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from proxy.workers.sources import check_url

Seconds = Annotated[float, Field(gt=0)]


class Settings(BaseSettings):
    """Settings of one proxy process. Times are seconds, sizes bytes, lengths tokens."""

    model_config = SettingsConfigDict(
        env_prefix="KVLOOP_",
        frozen=True,
        extra="ignore",
        env_ignore_empty=True,
    )

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on.")
    admin_host: str = Field(
        "127.0.0.1",
        description="Address of the operators' port. Loopback, because it asks for no key.",
    )
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Operators' port: metrics, switches, the live page. Unset: port + 1.",
    )

    workers: int = Field(
        1,
        ge=1,
        description="Processes of this proxy on the same port; one fills one core. They share "
        "nothing but Redis. Limits like max_in_flight count for each.",
    )

    prefill_urls: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Prefill workers, comma separated: http://host:port, or dns+http://name:port "
        "for all addresses of a name (a Kubernetes headless service), looked up again and again.",
    )
    decode_urls: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Decode workers, comma separated. At least one, here or in workers_file."
    )
    workers_file: str | None = Field(
        None,
        description="TOML file with prefill_urls and decode_urls, read again and again: more "
        "workers, which come and go with its lines.",
    )
    discovery_interval_seconds: Seconds = Field(
        2, description="Pause between two looks at workers_file, DNS and operators' changes."
    )

    redis_url: str | None = Field(
        None,
        description="Session table: redis://, rediss:// or unix://. Unset: a private Valkey server "
        "is started, which dies with this process.",
    )
    table_timeout_seconds: Seconds = Field(
        0.25, description="Longest wait for Redis; then the turn goes on without reuse."
    )

    reuse_enabled: bool = Field(
        True, description="False: every turn is prefilled cold and decode keeps nothing."
    )
    verify_tokens: bool = Field(
        True,
        description="Compare token ids before a pull. Only tests may turn this off, to show that "
        "answers go wrong without it.",
    )
    decode_kv_ttl_seconds: Seconds = Field(
        480,
        description="How long decode keeps a handle's blocks (its decoder_kv_blocks_ttl).",
    )
    expiry_margin_seconds: Seconds = Field(
        30,
        description="Sessions expire this much before decode's TTL: time for queueing on prefill, "
        "which itself declines a pull in the last 5 seconds.",
    )
    retention_share: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Share of what a decode worker would pin (its own limit, else half of its "
        "blocks) that ended turns may take. The rest is for answers under way: with more, decode "
        "refuses to keep some of them.",
    )
    shortest_lease_seconds: Seconds = Field(
        60,
        description="Least time for which a turn's KV may be claimed. Leases follow how soon a "
        "tenant's turns came back; a shorter one would give up on a user who thinks.",
    )
    longest_lease_seconds: Seconds | None = Field(
        None,
        description="Most time for which a turn's KV may be claimed. Unset: decode_kv_ttl_seconds "
        "less expiry_margin_seconds, which is also the most that it can be.",
    )
    canary_fraction: float = Field(
        0,
        ge=0,
        le=1,
        description="Share of warm turns whose first token is computed again, cold, in the "
        "background, and compared. Each costs prefill one cold prefill; one runs at a time.",
    )
    pull_threshold: int = Field(
        64,
        ge=1,
        description="Shortest pull in tokens, at least the workers' kv_recompute_threshold: below "
        "that prefill declines and computes.",
    )

    decode_local_append: bool = Field(
        True,
        description="Let decode compute the new part of a turn itself, behind the history that it "
        "still has, where that is cheaper than prefill and two transfers.",
    )
    append_tokens: int = Field(
        64,
        ge=1,
        description="Longest new part in tokens that decode computes itself while the costs of the "
        "routes are not known.",
    )
    append_stall_seconds: float = Field(
        0.15,
        ge=0,
        description="Longest expected time for which decode's running streams may stand still "
        "while it computes a turn's new part itself.",
    )
    plan_by_cost: bool = Field(
        True,
        description="Choose a turn's route by what its legs have cost on these workers. False: by "
        "append_tokens and pull_threshold alone.",
    )

    push_together: bool = Field(
        True,
        description="With workers that push (NixlPushConnector) send both legs at once. False: "
        "decode's after prefill's answer, so that no failing prefill leaves decode with blocks "
        "that vLLM never frees.",
    )

    api_keys_file: str | None = Field(
        None,
        description="TOML file of tenants and the hashes of their API keys; read again when it "
        "changes. Unset, and api_keys unset too: anyone may call.",
    )
    api_keys: SecretStr | None = Field(
        None, description="The same without a file: tenant=sha256:..., comma separated."
    )
    isolate_tenants: bool = Field(
        True,
        description="Give each tenant's requests a cache salt of its own, so that the time to "
        "first token tells nobody what another tenant has sent. Costs sharing of equal prompts "
        "between tenants; without API keys it changes nothing.",
    )
    tenant_max_in_flight: int | None = Field(
        None,
        ge=1,
        description="Requests of one tenant under way at once in this process; then 429. "
        "Unset: only max_in_flight limits. A tenant's own value in the file counts first.",
    )
    tenant_requests_per_minute: int | None = Field(
        None,
        ge=1,
        description="Requests of one tenant per minute in this process, a minute's worth at once; "
        "then 429 with Retry-After. A tenant's own value in the file counts first.",
    )
    worker_api_key: SecretStr | None = Field(
        None, description="Sent to the workers as a bearer token (their --api-key)."
    )
    worker_ca_file: str | None = Field(
        None,
        description="Certificate authorities for https workers. Unset: the system's. There is no "
        "setting to skip the check.",
    )
    tls_cert_file: str | None = Field(
        None, description="Certificate chain for clients; with tls_key_file the port speaks TLS."
    )
    tls_key_file: str | None = Field(None, description="Private key of tls_cert_file.")

    max_header_bytes: int = Field(
        32 * 2**10,
        ge=1024,
        description="Larger request heads get a 431. Bearer tokens and ids need a few hundred.",
    )
    max_body_bytes: int = Field(64 * 2**20, ge=1024, description="Larger requests get a 413.")

    connect_timeout_seconds: Seconds = Field(
        2, description="TCP connect to a worker. A dead host must not hold a turn for long."
    )
    tokenise_timeout_seconds: Seconds = Field(
        30, description="Rendering and tokenising a prompt: ~1.3 ms per 1k tokens, and queueing."
    )
    warm_prefill_timeout_seconds: Seconds = Field(
        60,
        description="Prefill with a pull. A prefill worker without bidirectional transfer never "
        "answers; after this the turn goes cold.",
    )
    cold_prefill_timeout_seconds: Seconds = Field(
        600, description="Prefill without a pull: a full context on a queue."
    )
    first_byte_timeout_seconds: Seconds = Field(
        600, description="Decode's first byte: transfer plus queueing, or a whole plain answer."
    )
    chunk_timeout_seconds: Seconds = Field(
        120, description="Silence between two chunks of a stream before decode counts as dead."
    )

    client_read_timeout_seconds: Seconds = Field(
        60, description="Receiving a whole request body; a trickling client holds only a socket."
    )
    client_write_timeout_seconds: Seconds = Field(
        60,
        description="A client that takes no byte for this long is cut off: while it stalls, decode "
        "holds a slot and KV blocks for it.",
    )
    abandoned_prefill_seconds: Seconds = Field(
        30,
        description="How long a prefill that carries a handle may go on after its client left. "
        "Cancelled while still queued it would leave decode's blocks pinned to their lease; "
        "finished, it frees them, and only the new part of the prompt is computed for nobody.",
    )

    max_in_flight: int = Field(
        1024,
        ge=1,
        description="Turns under way at once in this process. Above what the workers can run "
        "(their max-num-seqs together) more turns only lengthen the workers' own queues.",
    )
    max_queued: int = Field(
        256,
        ge=0,
        description="Turns that may wait for a place; the next one gets a 503 with Retry-After "
        "at once, which a client can act on, and an endless wait it cannot.",
    )
    queue_timeout_seconds: Seconds = Field(
        10, description="Longest wait for a place; then 503 with Retry-After."
    )
    drain_seconds: Seconds = Field(
        25,
        description="After SIGTERM running streams may go on for this long while new turns get a "
        "503. Below the 30 seconds after which Kubernetes kills.",
    )
    retry_share: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Repeated legs per turn that are allowed in the long run. When workers fail "
        "all round, repeats double the load on what is left; then the first failure stands.",
    )
    breaker_failures: int = Field(
        5,
        ge=1,
        description="Failed turns in a row before a worker that passes its health probes is left "
        "out all the same (a dead engine behind a living HTTP server).",
    )
    breaker_pause_seconds: Seconds = Field(5, description="How long; then one turn tries it again.")

    health_interval_seconds: Seconds = Field(2, description="Pause between two health probes.")
    health_timeout_seconds: Seconds = Field(
        5, description="One health probe. Busy workers answer late; see health_failures."
    )
    health_failures: int = Field(
        3, ge=1, description="Failed probes in a row before a worker is left out."
    )
    pull_failures: int = Field(
        3, ge=1, description="Failed pulls in a row before pulls to a prefill worker are paused."
    )
    pull_pause_seconds: Seconds = Field(30, description="How long that pause is.")

    recent_turns: int = Field(
        2000,
        ge=1,
        le=100_000,
        description="Turns that the live page remembers, about 1 kB each. No text is among it.",
    )

    otlp_endpoint: str | None = Field(
        None,
        description="Where traces go, OTLP over HTTP: http://collector:4318/v1/traces. Unset: none "
        "are made, and a client's traceparent is only passed on. Needs the extra kvloop[otel].",
    )
    trace_share: float = Field(
        1,
        ge=0,
        le=1,
        description="Share of turns that are traced when the client did not decide it: at "
        "thousands of turns a second a collector wants fewer.",
    )

    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR.")

    @field_validator("prefill_urls", "decode_urls", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip().rstrip("/") for part in value.split(",") if part.strip())
        return value

    @field_validator("prefill_urls", "decode_urls")
    @classmethod
    def _worker_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            check_url(url)
        if len(set(urls)) != len(urls):
            raise ValueError("the same worker is listed twice")
        return urls

    @field_validator("redis_url")
    @classmethod
    def _redis_scheme(cls, url: str | None) -> str | None:
        if url is not None and urlsplit(url).scheme not in ("redis", "rediss", "unix"):
            raise ValueError("must start with redis://, rediss:// or unix://")
        return url

    @field_validator("otlp_endpoint")
    @classmethod
    def _collector(cls, url: str | None) -> str | None:
        if url is not None and urlsplit(url).scheme not in ("http", "https"):
            raise ValueError("must be an http:// or https:// address")
        return url

    @field_validator("log_level")
    @classmethod
    def _level(cls, level: str) -> str:
        if level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise ValueError("must be DEBUG, INFO, WARNING or ERROR")
        return level.upper()

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if not self.decode_urls and not self.workers_file:
            raise ValueError("decode_urls is empty; name at least one decode worker")
        if self.admin_port_or_next > 65535:
            raise ValueError("no port is left after port for admin_port; name one")
        if self.port and self.admin_port == self.port:
            raise ValueError("admin_port must differ from port")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file go together; name both")
        for name in ("api_keys_file", "worker_ca_file", "tls_cert_file", "tls_key_file"):
            path = getattr(self, name)
            if path is not None and not os.path.isfile(path):
                raise ValueError(f"{name} names {path!r}, which is not a file")
        if self.expiry_margin_seconds >= self.decode_kv_ttl_seconds:
            raise ValueError(
                "expiry_margin_seconds must be smaller than decode_kv_ttl_seconds, or no session "
                "would ever be stored"
            )
        return self

    @property
    def admin_port_or_next(self) -> int:
        """0 (any free port) beside a port of 0."""
        if self.admin_port is not None:
            return self.admin_port
        return self.port + 1 if self.port else 0

    @property
    def session_ttl_seconds(self) -> float:
        return self.decode_kv_ttl_seconds - self.expiry_margin_seconds

    @property
    def longest_usable_seconds(self) -> float:
        """Longest time for which a holding may be claimed."""
        longest = self.longest_lease_seconds
        return min(self.session_ttl_seconds, longest or self.session_ttl_seconds)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        sources: list[PydanticBaseSettingsSource] = [init_settings, env_settings]
        if path := os.environ.get("KVLOOP_CONFIG"):
            sources.append(TomlConfigSettingsSource(settings_cls, toml_file=path))
        return tuple(sources)


class SettingsError(SystemExit):
    """Wrong settings: exit status 2, and a message that says what to mend."""


def load(arguments: list[str] | None = None) -> Settings:
    """Settings from flags, environment and file. Raises ``SettingsError``."""
    path = os.environ.get("KVLOOP_CONFIG")
    if path and not os.path.isfile(path):
        raise SettingsError(f"kvloop: KVLOOP_CONFIG names {path!r}, which is not a file")
    try:
        if arguments is None:
            return Settings()
        flags: CliSettingsSource[Any] = CliSettingsSource(
            Settings,
            cli_parse_args=arguments,
            cli_kebab_case=True,
            cli_prog_name="kvloop proxy",
            cli_hide_none_type=True,
        )
        return Settings(**flags())
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            name = str(problem["loc"][0]) if problem["loc"] else ""
            message = problem["msg"].removeprefix("Value error, ")
            if name:
                flag = name.replace("_", "-")
                lines.append(f"  {name}: {message} (KVLOOP_{name.upper()} or --{flag})")
            else:
                lines.append(f"  {message}")
        raise SettingsError("kvloop: wrong settings\n" + "\n".join(lines)) from None
