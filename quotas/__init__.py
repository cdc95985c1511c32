"""Who may have how much, who asked, who agreed, what it costs."""
