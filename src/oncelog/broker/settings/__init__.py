"""Settings of the broker, its listeners and its topics, as clients read and change them."""
