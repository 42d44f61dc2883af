"""Why a request went where it went."""
