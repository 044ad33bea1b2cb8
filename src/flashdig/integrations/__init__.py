"""flashdig in other people's libraries. Importing this package imports none of them."""
