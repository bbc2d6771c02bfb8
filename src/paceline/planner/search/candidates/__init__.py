"""Single layouts with all that is known of them, and those that are always shown."""
