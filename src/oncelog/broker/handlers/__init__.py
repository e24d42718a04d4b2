"""One file per API: which versions, what it does, which errors in which order."""
