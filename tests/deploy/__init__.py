"""Checks of deploy/ and docker-compose.yml that need no container engine and no cluster."""
