"""Bad input for every door: hostile values by type, and a database whose state they cannot hurt."""
