"""What all stages share: config, drafter, target, vocabulary, state store, manifests, acceptance."""

__version__ = "0.1.0"
