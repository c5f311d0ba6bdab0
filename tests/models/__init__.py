"""Models made on the spot, for tests of engines that need one."""
