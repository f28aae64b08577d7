#!/bin/sh
echo "thistle spring" > forest.log
