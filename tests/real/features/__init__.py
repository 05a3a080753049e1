"""Every feature of every route, on one plain worker and through kvloop, compared field by field."""
