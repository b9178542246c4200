"""Models written for engines that know nothing of Buddy: what a plan needs, as plain tables."""
