"""Operating the stack on its host: releases, phases, memory budgets, checks, backup."""
