"""The intermediate representation: frozen nodes, symbolic sizes, and ordered named passes over them."""
