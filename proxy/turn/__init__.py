"""One turn: plan it (pure), perform it, commit what decode kept."""
