"""Steps in virtual time: placed programs and schedules on described clusters, and whole classes of layouts at once."""
