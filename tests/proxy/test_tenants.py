"""Key files: what is read, and what a wrong one says."""

from __future__ import annotations

import pytest

from proxy.tenants import (
    KeysError,
    Tenant,
    hashed,
    keys_from_file,
    keys_from_text,
    presented_key,
)

ONE, TWO = hashed(b"one"), hashed(b"two")


def test_a_file_gives_tenants_their_keys_and_limits() -> None:
    """Several keys a tenant, so that one can be replaced while the other still works."""
    text = f'[tenants.acme]\nkeys = ["{ONE}", "{TWO}"]\nmax_in_flight = 3\n'
    acme = Tenant("acme", max_in_flight=3)
    assert keys_from_file(text) == {ONE: acme, TWO: acme}


def test_the_variable_gives_the_same_without_limits() -> None:
    assert keys_from_text(f"a={ONE}, b={TWO},") == {ONE: Tenant("a"), TWO: Tenant("b")}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no [tenants.<name>] table"),
        ("[tenants", "TOML"),
        ("tenants = 5", "no [tenants.<name>] table"),
        ("[tenants]\na = 5", "tenants.a is not a table"),
        ("[tenants.a]\nkeys = []", "at least one hash"),
        ("[tenants.a]", "at least one hash"),
        (f'[tenants.a]\nkeys = ["{ONE}"]\nmax_in_flight = 0', "max_in_flight"),
        (f'[tenants.a]\nkeys = ["{ONE}"]\nmax_in_flight = true', "max_in_flight"),
        (f'[tenants.a]\nkeys = ["{ONE}"]\nrate = 5', "'rate'"),
        ('[tenants.a]\nkeys = ["secret-in-clear"]', "sha256:<64 hex digits>"),
        (f'[tenants.a]\nkeys = ["{ONE}"]\n[tenants.b]\nkeys = ["{ONE}"]', "share a key"),
        (f'[tenants."a b"]\nkeys = ["{ONE}"]', "'a b'"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_no_key(text: str, words: str) -> None:
    with pytest.raises(KeysError) as caught:
        keys_from_file(text)
    assert words in str(caught.value)
    assert "secret-in-clear" not in str(caught.value)


@pytest.mark.parametrize("text", ["acme", "=sha256:1", f"a b={ONE}", "a=plain"])
def test_a_wrong_variable_is_refused(text: str) -> None:
    with pytest.raises(KeysError):
        keys_from_text(text)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({b"authorization": b"Bearer k"}, b"k"),
        ({b"authorization": b"bearer  k "}, b"k"),
        ({b"x-api-key": b"k"}, b"k"),
        ({b"authorization": b"Bearer k", b"x-api-key": b"other"}, b"k"),
        ({b"authorization": b"Basic k"}, None),
        ({b"authorization": b"Bearer "}, None),
        ({b"authorization": b"Bearer " + b"k" * 600}, None),
        ({}, None),
    ],
)
def test_a_key_is_read_where_the_sdks_put_it(headers: dict[bytes, bytes], key: bytes) -> None:
    assert presented_key(headers) == key
