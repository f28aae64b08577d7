#!/bin/sh
mv orange.txt sunset.md
