"""NIXL: an idle agent made through the Python API uses a whole core. Prints the share it uses."""

import time

from nixl import _api

STOCK = _api.nixlBind.nixlAgentConfig


def config_with(delay_us):
    class Config(STOCK):
        @property
        def pthrDelay(self):
            return STOCK.pthrDelay.__get__(self)

        @pthrDelay.setter
        def pthrDelay(self, _):
            STOCK.pthrDelay.__set__(self, delay_us)

    return Config


for delay_us in (0, 1_000, 5_000):
    _api.nixlBind.nixlAgentConfig = config_with(delay_us)
    agent = _api.nixl_agent(f"agent-{delay_us}", _api.nixl_agent_config(num_threads=0))
    used, started = time.process_time(), time.monotonic()
    time.sleep(3)
    share = (time.process_time() - used) / (time.monotonic() - started)
    print(f"pthrDelay {delay_us:>5} us: {100 * share:.1f} % of a core while idle", flush=True)
    del agent
