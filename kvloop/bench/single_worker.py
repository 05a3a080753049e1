"""[io] ``python -m kvloop.bench.single_worker``: one aggregated vLLM, to compare with.

The same engine settings as our workers have, less the connector; prefix cache on. So the arms
differ in what is compared and not in how vLLM was started.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from worker_launch import launcher, profiles


def command(arguments: argparse.Namespace) -> profiles.LaunchCommand:
    """The worker's command. Raises ``profiles.LaunchError``."""
    made = profiles.build_command(
        profiles.profile_named(arguments.profile),
        profiles.Role.DECODE,
        model=arguments.model,
        served_model_name=arguments.served_model_name,
        host="127.0.0.1",
        port=arguments.port,
        # Never bound: there is no connector. The builder only wants different ports.
        side_channel_host="127.0.0.1",
        side_channel_port=1 if arguments.port != 1 else 2,
        python_executable=launcher.own_interpreter(),
        overrides=profiles.parse_overrides(["enable-prefix-caching=true", *arguments.set]),
    )
    at = made.argv.index("--kv-transfer-config")
    env = {key: value for key, value in made.env.items() if "SIDE_CHANNEL" not in key}
    return replace(made, argv=made.argv[:at] + made.argv[at + 2 :], env=env)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--profile", required=True)
    options.add_argument("--model", required=True)
    options.add_argument("--served-model-name", required=True)
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--set", action="append", default=[])
    try:
        made = command(options.parse_args())
        launcher.check_environment()
        sys.exit(launcher.run(made))
    except (profiles.LaunchError, launcher.EnvironmentUnfit) as error:
        sys.exit(f"kvloop bench: {error}")


if __name__ == "__main__":
    main()
