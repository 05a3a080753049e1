"""The operators' port."""

from __future__ import annotations

import socket

import httpx2 as httpx
import pytest

from proxy.app import App
from proxy.server import admin_socket
from proxy.settings import Settings, SettingsError
from tests.proxy.conftest import Serve


def admin(app: App) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app.admin), base_url="http://127.0.0.1"
    )


async def test_reuse_is_switched_for_all_proxies_and_back(serve: Serve) -> None:
    """PUT on one proxy's admin port is what another one's GET says."""
    one, other = (await serve()).app, (await serve()).app
    async with admin(one) as here, admin(other) as there:
        assert (await here.put("/admin/reuse", json={"on": False})).json()["fleet"] is False
        assert (await there.get("/admin/reuse")).json()["fleet"] is False
        await here.put("/admin/reuse", json={"on": True})
        assert (await there.get("/admin/reuse")).json()["fleet"] is True


async def test_a_wrong_body_names_the_field(serve: Serve) -> None:
    async with admin((await serve()).app) as client:
        answer = await client.put("/admin/reuse", json={"on": "perhaps"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "on")


async def test_without_redis_the_switch_says_503(serve: Serve) -> None:
    """Nothing was switched, and the caller is told so."""
    serving = await serve(redis_url="redis://127.0.0.1:1")
    async with admin(serving.app) as client:
        answer = await client.put("/admin/reuse", json={"on": False})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "table_unavailable")


async def test_clients_do_not_reach_operators_routes(serve: Serve) -> None:
    assert (await (await serve()).get("/admin/reuse")).status == 404


def test_a_taken_admin_port_stops_the_start_with_its_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = Settings(decode_urls=("http://d:1",), admin_port=taken.getsockname()[1])
        with pytest.raises(SettingsError, match="KVLOOP_ADMIN_PORT"):
            admin_socket(settings)


def test_the_admin_port_is_the_next_one_unless_named() -> None:
    urls = ("http://d:1",)
    assert Settings(decode_urls=urls, port=9000).admin_port_or_next == 9001
    assert Settings(decode_urls=urls, port=9000, admin_port=7).admin_port_or_next == 7
    assert Settings(decode_urls=urls, port=0).admin_port_or_next == 0
    with pytest.raises(ValueError, match="must differ"):
        Settings(decode_urls=urls, port=9000, admin_port=9000)
