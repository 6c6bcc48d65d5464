"""All that compiled code needs when it runs."""
