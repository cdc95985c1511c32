"""Pure parts of monitoring: samples, frames, tile states, rollup arithmetic. No Django, no database, no clock."""
