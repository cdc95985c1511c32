"""Pure rules of quotas, charges, approvals and billing: no Django, no clock, no database."""
