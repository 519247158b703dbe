"""The loop: controller, policies, judges, transcript, ledger, and the events that it emits."""
