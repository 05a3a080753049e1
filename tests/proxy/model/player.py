"""Plays the state machine with likely steps: hypothesis alone rarely gets to a second turn.

A seed is a whole history, so a failure names one number.
"""

from __future__ import annotations

import random

from tests.proxy.model.machine import Budgeted, Reuse

_LENGTHS = (1, 16, 17, 33, 63, 64, 65, 96, 130, 200)
_ENDINGS = ("stop",) * 6 + ("length", "stop_string")


def play(seed: int, steps: int = 60, kind: type[Reuse] = Reuse) -> Reuse:
    """One history. Raises when a fault is found."""
    dice = random.Random(seed)
    machine = kind()
    # Every third world has our connector, so that decode may be asked to append.
    machine.begin(
        dice.choice((16, 32, 64)), dice.choice((1, 1, 1, 2)), dice.choice(_LENGTHS), seed % 3 == 0
    )
    try:
        for _ in range(steps):
            _step(machine, dice)
            if isinstance(machine, Budgeted):
                machine.the_budget_is_kept_when_nothing_is_under_way()
        return machine
    finally:
        machine.teardown()


def _step(machine: Reuse, dice: random.Random) -> None:
    world = machine.world
    if isinstance(machine, Budgeted) and dice.random() < 0.1:
        machine.a_sweep(dice.randrange(2))
    who = dice.randrange(20)
    action = dice.choices(
        ("new", "turn", "arrive", "fail", "leave", "time", "other", "branch", "twin", "restart"),
        (3, 12, 8, 1.5, 1.5, 1.5, 1, 2, 1, 0.7),
    )[0]
    if not machine.conversations or (action == "new" and len(machine.conversations) < 8):
        machine.someone_new(
            dice.choice(("", "", "t")),
            dice.choice(("m", "m", "m-lora")),
            dice.choice((None, None, "s")),
            dice.choice((None, "c", "e")),
            dice.choice((65, 96, 130, 200, *_LENGTHS)),
            dice.random() < 0.3,
        )
        return
    match action:
        case "turn":
            if machine.last:
                kinds = ("grow",) * 6 + ("edit", "shorten", "compact", "reorder", "retokenise")
                how = dice.choice(kinds)
                machine.change_history(who, how, dice.choice(_LENGTHS), dice.random())
            machine.send(
                who,
                dice.randrange(2),
                dice.choice((1, 2, 16, 17, 33, 64, 90)),
                dice.choice(_ENDINGS),
                dice.random() < 0.85,
                dice.random() < 0.5,
                dice.choice((0, 0, 0, 1, 2)),
                dice.choice((0, 0, 0, 1, 5)),
                dice.random() < 0.7,
            )
        case "arrive" if world.gates:
            machine.a_call_arrives(dice.randrange(50))
        case "fail" if world.gates:
            machine.a_call_fails(dice.randrange(50), dice.choice(("failed", "gone")))
        case "leave" if world.turns:
            machine.a_client_leaves(dice.randrange(50))
        case "time":
            machine.time_passes(dice.choice((1.0, 10.0, 100.0, 445.0, 470.0, 485.0)))
        case "branch":
            machine.branch(who, dice.choice(_LENGTHS))
        case "twin":
            machine.same_words_elsewhere(who, *(dice.random() < 0.5 for _ in range(3)))
        case "restart":
            machine.decode_restarts(dice.random() < 0.5)
        case "other":
            which = dice.randrange(2)
            match dice.randrange(4):
                case 0:
                    machine.a_restart_is_noticed(which)
                case 1:
                    machine.decode_seems_ill(which, dice.random() < 0.7)
                case 2:
                    machine.prefill_restarts()
                case _:
                    machine.a_proxy_dies(which)
