"""Generated from protos/ by scripts/make_protos.sh; never edited."""
