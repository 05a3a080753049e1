"""vLLM on CPU: where NixlConnector puts the thread that builds it. Prints the cores it may use.

Runs the connector's own lines, cut out of the installed vLLM, so no model and no peer are needed.
"""

import inspect
import os
import textwrap

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.platforms import current_platform

source = inspect.getsource(base_worker)
begin = source.index("            numa_core_list = current_platform.discover_numa_topology()")
end = source.index("os.sched_setaffinity(0, rsv_cores_for_kv)", begin)
lines = textwrap.dedent(source[begin : source.index("\n", end)])
print("before:", sorted(os.sched_getaffinity(0)))
exec(lines, {"current_platform": current_platform, "os": os})
print("after: ", sorted(os.sched_getaffinity(0)))
