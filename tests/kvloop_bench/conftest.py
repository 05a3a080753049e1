"""The proxy's fixtures serve here too: a benchmark is a client of it."""

from tests.proxy.conftest import serve as serve
