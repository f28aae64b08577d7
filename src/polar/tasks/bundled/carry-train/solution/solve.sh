#!/bin/sh
cat robin.log > feather.md
