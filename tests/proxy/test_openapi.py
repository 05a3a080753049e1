"""The OpenAPI document, and answers that keep to it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance

from proxy.api.forward import JSON_ROUTES
from proxy.dialects import DIALECTS
from tests.fakes.worker import MODEL
from tests.proxy.conftest import Serve, Serving

pytestmark = pytest.mark.slow


async def test_every_route_is_described(serve: Serve) -> None:
    """Generating, forwarded and operating routes; security only where there are keys."""
    document = (await (await serve()).get("/openapi.json")).json
    for path in (*(d.path for d in DIALECTS), "/v1/embeddings", "/tokenize", "/v1/models"):
        assert path in document["paths"], path
    assert "security" not in document
    keyed = await serve(api_keys="a=sha256:" + "0" * 64)
    assert (await keyed.get("/openapi.json")).json["security"]


def check_all(operation: Any, mode: Any, url: str, answered: list[tuple[str, int]]) -> None:
    """A few generated requests for one operation."""

    @settings(
        max_examples=5,
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        answer = case.call(base_url=url)
        # The fakes fail on what real workers refuse: a 502 is theirs, a 500 would be ours.
        assert answer.status_code != 500
        # And 1.0 is a whole number for JSON Schema, but no token id for us.
        excluded = [not_a_server_error, positive_data_acceptance]
        case.validate_response(answer, excluded_checks=excluded)
        answered.append((operation.path, answer.status_code))

    check()


@pytest.mark.parametrize("negative", [False, True], ids=["valid", "invalid"])
async def test_generated_requests_get_described_answers(serving: Serving, negative: bool) -> None:
    """Schemathesis makes requests from the document, right ones and wrong ones; the status, the
    type and the body of each answer must be among those that the document names."""
    document = (await serving.get("/openapi.json")).json
    for dialect in DIALECTS:  # any other model is a 404
        body = document["paths"][dialect.path]["post"]["requestBody"]["content"]
        body["application/json"]["schema"]["properties"]["model"] = {"const": MODEL}
    schema = schemathesis.openapi.from_dict(document)
    mode = schemathesis.GenerationMode
    wanted = mode.NEGATIVE if negative else mode.POSITIVE
    answered: list[tuple[str, int]] = []

    def call_all() -> None:
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.path in JSON_ROUTES and operation.path != "/v1/embeddings":
                continue  # one stands for all: the description is the same
            if operation.method.upper() == "POST" or not negative:
                check_all(operation, wanted, serving.url, answered)

    await asyncio.to_thread(call_all)
    refused = [path for path, status in answered if status == 400]
    served = [path for path, status in answered if status == 200]
    for dialect in DIALECTS:
        assert dialect.path in (refused if negative else served)
