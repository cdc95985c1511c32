"""Finance pages: home, month, ledger, price book."""
